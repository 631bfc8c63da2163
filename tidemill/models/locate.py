"""Brings the model that a setting or a command names to this machine, from wherever it lies."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig
from tidemill.errors import DataError, ModelError, StoreError
from tidemill.models.resolve import ResolvedModel, default_cache, resolve_model
from tidemill.store.download_once import bring_once
from tidemill.store.object_store import ObjectStore, parse_uri
from tidemill.store.server import open_store
from tidemill.tracking.mlflow_server import tracking_uri
from tidemill.tracking.registry import model_source, pinned_uri


@dataclass(frozen=True, slots=True)
class Locator:
    """Where models may lie besides this machine and the hub.

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
        """Those of a run."""
        return cls(config.store, config.output, tracking_uri(config))

    def bring(self, name: str, folder: Path) -> ResolvedModel:
        """The model as a folder on this machine.

        Args:
            name: as in `RunConfig.model`.
            folder: for one that lies in the store. It is brought anew each time, because a name in a store may stand
                for other weights tomorrow.

        Raises:
            ModelError: it is not found, or is no model.
            StoreError: the store cannot be reached.
        """

        def fetch(address: str, cache: Path) -> Path:
            del cache
            uri = model_source(address, self.registry) if address.startswith("models:/") else address
            try:
                bucket, prefix = parse_uri(uri)
            except StoreError as error:
                raise ModelError(f"model {address!r}: {error}") from error
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier try, perhaps of another model
            with open_store(self.store.model_copy(update={"bucket": bucket}), self.output) as store:
                if not store.list(prefix):
                    raise ModelError(f"model {address!r} does not exist: no object of {store.endpoint} has this prefix")
                store.download_folder(prefix, folder)
            return folder

        return resolve_model(name, default_cache(), fetch)

    def fetch_file(self, uri: str, path: Path) -> None:
        """Bring the object `s3://BUCKET/KEY` to a file.

        Raises:
            DataError: there is no such object, or the URI has another form.
            StoreError: the store cannot be reached.
        """
        with open_store(self.store, self.output) as run_store:
            try:
                bucket, key = parse_uri(uri)
            except StoreError as error:
                raise DataError(str(error)) from error
            store = ObjectStore(
                run_store.client, run_store.endpoint, bucket
            )  # which makes no bucket of a mistyped name
            if not store.exists(key):
                raise DataError(f"{uri}: no such object at {store.endpoint}. Upload it, or mend the name.")
            store.get_file(key, path)


def pin_model(config: RunConfig) -> RunConfig:
    """The settings with `models:/NAME@ALIAS` as `models:/NAME/VERSION`: an alias may move while the run goes on.

    Raises:
        ModelError: there is no such alias.
    """
    if not config.model.startswith("models:/"):
        return config
    return config.model_copy(update={"model": pinned_uri(config.model, tracking_uri(config))})


def locate_model(config: RunConfig) -> ResolvedModel:
    """The model that a run starts from; one of the store is brought to the run's folder."""
    return Locator.of(config).bring(config.model, config.folder / "start")


def model_here(config: RunConfig) -> ResolvedModel:
    """The model on the disk of this pod: whichever actor of the pod comes first brings it, the others find it.

    A model of the store lies in the run's folder, with its name beside it once it is whole. A pod is made for one
    attempt, so that the name stands for the same weights as long as the folder is there.
    """
    folder = config.folder / "start"
    model = bring_once(folder, config.model, lambda: locate_model(config))
    return model or resolve_model(str(folder), default_cache())
