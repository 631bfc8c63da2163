"""The users of the embedded S3 server, which all runs of one output folder on one machine share.

`embedded_store` runs a server during a block; the last process that leaves its block stops it. `start_server` runs it
until `stop_server`. Both adopt a server that an earlier process left running.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from tidemill.config.storage import StoreConfig
from tidemill.errors import StoreError
from tidemill.store.object_store import ObjectStore, credentials
from tidemill.store.seaweedfs import ServerInfo, adopt, end, find_server, launch, write_info

LOCK_TIMEOUT_S = 90.0
"""More than a failing start and the stop after it take."""


@contextmanager
def open_store(config: StoreConfig, output: Path) -> Iterator[ObjectStore]:
    """The store of a run: the embedded server below `output`, or the configured endpoint, keys from the environment.

    Raises:
        StoreError: it cannot be started or reached.
        ConfigError: the endpoint is not embedded and there are no keys.
    """
    if config.endpoint != "embedded":
        yield ObjectStore.connect(config.endpoint, config.bucket, *credentials())
        return
    with embedded_store(store_folder(output)) as server:
        yield ObjectStore.connect(server.endpoint, config.bucket, server.access_key, server.secret_key)


def store_folder(output: Path) -> Path:
    return output / "store"


@contextmanager
def embedded_store(folder: Path) -> Iterator[ServerInfo]:
    """A server for `folder` during the block: the running one, or a new one."""
    folder = make_folder(folder)
    with (folder / "users.lock").open("w") as users:
        with locked(folder):
            info = adopt(folder) or launch(folder, keep=False)
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield info
        finally:
            with locked(folder):
                fcntl.flock(users, fcntl.LOCK_UN)
                current = find_server(folder)
                if current and not current.keep and is_last(folder):
                    end(folder, current)


def start_server(folder: Path) -> ServerInfo:
    """Start the server of `folder`, or adopt the running one, and leave it running."""
    folder = make_folder(folder)
    with locked(folder):
        info = adopt(folder)
        if info is None:
            return launch(folder, keep=True)
        info = replace(info, keep=True)
        write_info(folder, info)
        return info


def stop_server(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    folder = folder.resolve()
    with locked(folder):
        info = find_server(folder)
        if info is None:
            return False
        end(folder, info)
        return True


def make_folder(folder: Path) -> Path:
    folder = folder.resolve()
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {folder} for the embedded store: {error}. Choose another output.") from error
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Serialize starts and stops; the lock ends with the process that holds it."""
    lock = FileLock(folder / "server.lock")
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout as error:
        seconds = f"{LOCK_TIMEOUT_S:.0f} s"
        raise StoreError(f"another process starts or stops the server of {folder} for {seconds}") from error
    try:
        yield
    finally:
        lock.release()


def is_last(folder: Path) -> bool:
    with (folder / "users.lock").open("w") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
