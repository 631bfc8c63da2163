"""An engine's side of the object store: downloads a version to a file in memory, based on the newest one it has.

The file is the trainer's export byte for byte, so an engine loads it as an engine on the trainer's host does. Engines
of one host share the folder: one downloads the file, the others find it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tidemill.errors import ChainError, EngineError, StoreMissingError
from tidemill.protocols import WeightUpdate
from tidemill.store.object_store import ObjectStore, parse_uri
from tidemill.weights.delta import Bytes, apply, checksum
from tidemill.weights.manifest import Location, Part, StoredVersion
from tidemill.weights.safetensors_file import Span, parse_header
from tidemill.weights.transport import no_room

THREADS = 4
POLL_S = 0.01
FILE = re.compile(r"^([0-9a-f]{8})-(\d{8,})\.safetensors$")
FIX = "The trainer uploads a full snapshot at its next sync; find out why the store lost or changed an object"

LOG = logging.getLogger(__name__)


class WeightDownloader:
    """Downloads versions for one engine.

    Args:
        folder: on a memory-backed file system, the same for all engines of the host.
        open_store: connects to the store of the run.
        timeout_s: for another engine that downloads, or still loads an older version.
    """

    def __init__(
        self, folder: Path, open_store: Callable[[], AbstractContextManager[ObjectStore]], timeout_s: float
    ) -> None:
        self.folder, self.open_store, self.timeout_s = folder, open_store, timeout_s
        folder.mkdir(parents=True, exist_ok=True)
        self.users = (folder / "users.lock").open("w")
        fcntl.flock(self.users, fcntl.LOCK_SH)

    @asynccontextmanager
    async def local(self, update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        """Bring the version to a file of this host, which exists while the body runs.

        Raises:
            ChainError: the stored version is damaged or incomplete.
            StoreError: the store cannot be reached.
            SyncError: no room.
            EngineError: another engine keeps the folder for too long.
        """
        with (self.folder / "fetch.lock").open("w") as lock:
            path = await asyncio.to_thread(self.locked_fetch, lock, update)
            yield replace(update, path=str(path))

    def close(self) -> None:
        """Free the memory if no other engine of this host is left. May be called again."""
        if self.users.closed:
            return
        if try_lock(self.users, fcntl.LOCK_EX):
            self.delete_all_but(None)
        self.users.close()

    def locked_fetch(self, lock: IO[str], update: WeightUpdate) -> Path:
        """Returns with the lock shared, so that other engines may load the file too and none may delete it."""
        path = self.path(location_of(update))
        while not self.found(lock, path, update):
            with self.open_store() as store:
                self.fetch(store, update)
        return path

    def found(self, lock: IO[str], path: Path, update: WeightUpdate) -> bool:
        """Take the lock: shared if the file exists, also while others load it; otherwise exclusive, to download it."""
        deadline = time.monotonic() + self.timeout_s
        while not (try_lock(lock, fcntl.LOCK_SH) and path.exists()):
            if try_lock(lock, fcntl.LOCK_EX):
                return False
            if time.monotonic() > deadline:
                raise EngineError(
                    f"version {update.version} waited in {self.folder} for more than {self.timeout_s:g} s, because "
                    "another engine of this host fetches or loads one; look at that engine, or raise sync.timeout_s"
                )
            time.sleep(POLL_S)
        return True

    def fetch(self, store: ObjectStore, update: WeightUpdate) -> Path:
        """Download a version: from the newest base in the folder, or from a full snapshot if that fails.

        Raises:
            ChainError: the stored version is damaged or incomplete.
            StoreError: the store does not answer, or answers with an error; the folder is left as it is.
        """
        location = location_of(update)
        path = self.path(location)
        if path.exists():
            return path
        base = self.newest_base(location)
        try:
            self.build(store, location, path, base)
        except (ChainError, StoreMissingError) as error:
            if base is None:
                raise ChainError(f"cannot download version {update.version} from the store: {error}. {FIX}") from error
            LOG.warning(
                "version %s cannot be made from %s (%s); downloading a full snapshot", update.version, base, error
            )
            self.path(base).unlink(missing_ok=True)
            return self.fetch(store, update)
        self.delete_all_but(path)
        return path

    def build(self, store: ObjectStore, location: Location, path: Path, base: Location | None) -> None:
        """Make the file of a version from its chain of deltas; it appears only when every checksum is right."""
        versions = chain(store, location, base)
        partial = self.folder / f".{path.name}.{secrets.token_hex(4)}.part"
        try:
            data = reserve(partial, versions[0].manifest.nbytes)
            if base is not None and versions[0].manifest.base is not None:
                copy_base(self.path(base), data)
            for version in versions:
                receive(store, version, data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def newest_base(self, location: Location) -> Location | None:
        """The newest file in the folder that a delta of the same attempt may be applied to."""
        matches = (FILE.match(path.name) for path in self.folder.iterdir())
        held = (int(match[2]) for match in matches if match and match[1] == location.attempt)
        serial = max((serial for serial in held if serial < location.serial), default=None)
        return None if serial is None else location.at(serial)

    def path(self, location: Location) -> Path:
        return self.folder / f"{location.attempt}-{location.serial:08d}.safetensors"

    def delete_all_but(self, path: Path | None) -> None:
        """Delete the files that the newest version replaces, and those that a killed engine left."""
        for other in self.folder.iterdir():
            if other != path and other.suffix in {".safetensors", ".part"}:
                other.unlink()


def location_of(update: WeightUpdate) -> Location:
    return Location.parse(parse_uri(update.path)[1])


def chain(store: ObjectStore, location: Location, base: Location | None) -> list[StoredVersion]:
    """The versions to apply, oldest first: those after `base` if it is an ancestor, else from a full snapshot on."""
    versions = [StoredVersion.load(store, location)]
    while (serial := versions[-1].manifest.base) is not None and (base is None or serial != base.serial):
        versions.append(StoredVersion.load(store, location.at(serial)))
    return versions[::-1]


def reserve(path: Path, nbytes: int) -> Bytes:
    """Create and map a file of zeros. Its memory is taken now, because later a lack of it would be a signal."""
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        raise no_room(path.parent, nbytes) from error
    return np.memmap(path, dtype=np.uint8, mode="r+")


def copy_base(path: Path, data: Bytes) -> None:
    """Fill `data` with the version that the first delta is against."""
    try:
        base = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ChainError(f"{path} cannot be read: {error}") from error
    if len(base) != len(data):
        raise ChainError(f"{path} has {len(base)} bytes, and the delta is for {len(data)}")
    data[:] = base


def receive(store: ObjectStore, version: StoredVersion, data: Bytes) -> None:
    """Turn the base in `data` into `version`, and check every tensor."""
    manifest = version.manifest
    header = np.frombuffer(manifest.header_bytes(), np.uint8)
    if manifest.base is None:
        data[: len(header)] = header
    elif not np.array_equal(data[: len(header)], header):
        raise ChainError(f"version {manifest.version} is a delta for tensors of other names or shapes")
    where = {span.name: span for span in parse_header(manifest.header_bytes(), len(data))}
    if where.keys() != {tensor.name for tensor in manifest.tensors()}:
        raise ChainError(f"the manifest of version {manifest.version} does not list the tensors of its header")
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(receive_part, store, version, n, part, where, data) for n, part in enumerate(manifest.parts)
        ]
    for job in jobs:
        job.result()


def receive_part(
    store: ObjectStore, version: StoredVersion, number: int, part: Part, where: Mapping[str, Span], data: Bytes
) -> None:
    nbytes = sum(tensor.nbytes for tensor in part)
    key = version.location.part_key(number)
    payload = memoryview(store.get_bytes(key) if nbytes else b"")
    if len(payload) != nbytes:
        raise ChainError(f"{store.uri(key)} has {len(payload)} bytes instead of {nbytes}")
    for stored in part:
        span = where[stored.name]
        tensor = data[span.start : span.stop]
        what = f"tensor {stored.name} of version {version.manifest.version} in {store.uri(key)}"
        try:
            apply(stored.encoding, payload[: stored.nbytes], tensor, span.width)
        except ValueError as error:
            raise ChainError(f"{what} is damaged: {error}") from error
        if (found := checksum(tensor.data)) != stored.checksum:
            raise ChainError(f"{what} is damaged, or its base is: its checksum is {found}, not {stored.checksum}")
        payload = payload[stored.nbytes :]


def try_lock(file: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
