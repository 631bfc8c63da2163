"""Files of prompts on their way to a cluster: by their content, so that the same file is one object."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.errors import DataError
from tidemill.store.server import open_store

SOURCES = ("train", "held_out")


def local_files(config: RunConfig) -> dict[str, Path]:
    """The files of this machine that `data` names, by their key."""
    named = {key: source for key in SOURCES if (source := config.data.model_dump()[key]) is not None}
    return {key: Path(source) for key, source in named.items() if "://" not in source}


def ship(config: RunConfig, endpoint: str | None = None) -> RunConfig:
    """Upload the files of prompts to `inputs/SHA256/NAME` of the run's store; the settings that come back name those.

    Args:
        config: of the run.
        endpoint: where the store is seen from here, if not at `store.endpoint`.

    Raises:
        DataError: a file cannot be read.
        StoreError: the store cannot be reached.
    """
    files = local_files(config)
    if not files:
        return config
    seen = config.store if endpoint is None else config.store.model_copy(update={"endpoint": endpoint})
    with open_store(seen, config.output) as store:
        sources = {key: store.uri(store.put_bytes(address(data, path), data).key) for key, path, data in read(files)}
    return config.model_copy(update={"data": config.data.model_copy(update=sources)})


def address(data: bytes, path: Path) -> str:
    """Where a file lies in the store."""
    return f"inputs/{hashlib.sha256(data).hexdigest()}/{path.name}"


def read(files: dict[str, Path]) -> list[tuple[str, Path, bytes]]:
    """(key, path, content) of every file.

    Raises:
        DataError: one cannot be read.
    """
    try:
        return [(key, path, path.read_bytes()) for key, path in files.items()]
    except OSError as error:
        raise DataError(f"prompts that are to be uploaded cannot be read: {error}") from error
