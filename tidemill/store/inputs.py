"""Uploads files of prompts for a cluster. The key is the digest of the content, so that equal files are one object."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tidemill.config.run import RunConfig
from tidemill.errors import DataError
from tidemill.store.server import open_store

SOURCES = ("train", "held_out")


def local_files(config: RunConfig) -> dict[str, Path]:
    named = {key: source for key in SOURCES if (source := config.data.model_dump()[key]) is not None}
    return {key: Path(source) for key, source in named.items() if "://" not in source}


def upload_prompts(config: RunConfig, endpoint: str | None = None) -> RunConfig:
    """Upload the files of prompts to `inputs/SHA256/NAME` of the run's store; returns settings that name the objects.

    Args:
        config: of the run.
        endpoint: address of the store from this machine, if not `store.endpoint`.

    Raises:
        DataError: a file cannot be read.
        StoreError: the store cannot be reached.
    """
    files = local_files(config)
    if not files:
        return config
    try:
        contents = {key: path.read_bytes() for key, path in files.items()}
    except OSError as error:
        raise DataError(f"prompts cannot be read for the upload: {error}") from error
    reached = config.store if endpoint is None else config.store.model_copy(update={"endpoint": endpoint})
    sources = {}
    with open_store(reached, config.output) as store:
        for key, data in contents.items():
            stored = store.put_bytes(f"inputs/{hashlib.sha256(data).hexdigest()}/{files[key].name}", data)
            sources[key] = store.uri(stored.key)
    return config.model_copy(update={"data": config.data.model_copy(update=sources)})
