"""How a version travels from the trainer to the engines: the transports of `sync.transport`, seen from the trainer.

shared_memory   the trainer writes a file that the engines of its host map (`weights.tensor_files`)
object_store    the trainer uploads a file (`weights.upload`), and every engine downloads it (`weights.download`)
"""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tidemill.errors import CheckpointError, StoreError, SyncError
from tidemill.protocols import WeightUpdate
from tidemill.records import Float32Array, Int32Array
from tidemill.store.lease import Fence
from tidemill.store.object_store import ObjectStore

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that engines can fetch, and metrics of how it got there."""

    update: WeightUpdate
    metrics: Mapping[str, float] = field(default_factory=dict)


class WeightSource(Protocol):
    """The trainer, as its weights are fetched from it: `actors.ranks.RemoteRanks`. The caller has the deadlines."""

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """`[T-1]` natural log-probs of `token_ids[1:]` under the present weights at temperature 1."""
        ...

    async def export(self, path: Path) -> int:
        """Write the present weights to a safetensors file of this host; returns its bytes."""
        ...

    async def write_weights(self) -> None:
        """Write the present weights to a file of the trainer's host, to be uploaded."""
        ...

    async def upload_weights(self, version: int) -> Publication:
        """Upload what was written last as `version`, while training goes on."""
        ...

    async def upload_snapshot(self) -> Publication:
        """Upload the newest version once more, in a form that depends on no other version."""
        ...


class Transport(Protocol):
    """One way from the trainer to the engines."""

    async def export(self) -> None:
        """Write the trainer's present weights down; they may change when this returns.

        Raises:
            SyncError: no room, or the export is not whole.
        """
        ...

    async def send(self, version: int) -> Publication:
        """Make what was exported last available to engines as `version`.

        Raises:
            StoreError: the object store failed.
        """
        ...

    async def snapshot(self) -> Publication:
        """Make the newest version available again, in a form that depends on no other version."""
        ...

    def release(self, update: WeightUpdate) -> None:
        """No engine will fetch this version any more."""
        ...

    def close(self) -> None:
        """Free everything; engines keep the weights they adopted."""
        ...


class SharedMemoryTransport:
    """`shared_memory`: files that the engines of this host map.

    Two files are used in turn: the one of the newest version, and the spare, which held the version before it and is
    written again for the next one. A spare that an engine still reads, because it was too slow or was given up, is
    deleted instead and stays in memory for that engine alone. So the memory of two versions is used all the time.

    Args:
        folder: of its own, on a memory-backed file system; created here, removed by `close`.
        source: exports the trainer's weights.
        expected_nbytes: size of an export, so that room is checked before the first one too.
    """

    def __init__(self, folder: Path, source: WeightSource, expected_nbytes: int = 0) -> None:
        self._folder, self._source, self._nbytes = folder, source, expected_nbytes
        self._spare = folder / "spare.safetensors"
        self._newest: Publication | None = None
        # A run that was killed may have left its files here.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    async def export(self) -> None:
        with writer_lock(self._spare) as locked:
            if not locked:
                self._spare.unlink(missing_ok=True)
                check_room(self._folder, self._nbytes)
            with room_in(self._folder, self._nbytes):
                self._nbytes = await self._source.export(self._spare)
            if not self._spare.is_file() or self._spare.stat().st_size != self._nbytes:
                raise SyncError(f"the export of the weights announced {self._nbytes} bytes and left another file")

    async def send(self, version: int) -> Publication:
        """Name the exported file after its version; engines can open it from now on."""
        path = self._folder / f"v{version}.safetensors"
        self._spare.rename(path)
        self._newest = Publication(WeightUpdate(version, str(path), self._nbytes))
        return self._newest

    async def snapshot(self) -> Publication:
        """The same file: it depends on no other version."""
        assert self._newest is not None
        return self._newest

    def release(self, update: WeightUpdate) -> None:
        Path(update.path).rename(self._spare)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ObjectStoreTransport:
    """`object_store`: the trainer uploads by itself, because it may be on another host."""

    source: WeightSource
    store: ObjectStore
    prefix: str
    fence: Fence | None = None  # an attempt that lost the lease leaves the weights to the attempt that holds it

    async def export(self) -> None:
        await self.source.write_weights()

    async def send(self, version: int) -> Publication:
        try:
            return await self.source.upload_weights(version)
        except StoreError as error:
            raise type(error)(f"version {version} could not be published through the object store: {error}") from error

    async def snapshot(self) -> Publication:
        try:
            return await self.source.upload_snapshot()
        except StoreError as error:
            raise type(error)(f"the newest version could not be published as a snapshot: {error}") from error

    def release(self, update: WeightUpdate) -> None:
        """Nothing: later deltas may need it, so the uploader decides."""

    def close(self) -> None:
        """Delete the published weights. A failure costs space and does not fail the run: it has its checkpoint."""
        try:
            if self.fence is not None:
                self.fence.check()
            self.store.delete_prefix(self.prefix)
        except (StoreError, CheckpointError) as error:
            LOG.warning("published weights could not be deleted: %s", error)


@contextmanager
def writer_lock(path: Path) -> Iterator[bool]:
    """Lock a file exclusively, to write it again; False if it is still read, or does not exist."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def check_room(folder: Path, nbytes: int) -> None:
    if shutil.disk_usage(folder).free < nbytes:
        raise no_room(folder, nbytes)


@contextmanager
def room_in(folder: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(folder, nbytes) from error


def no_room(folder: Path, nbytes: int) -> SyncError:
    return SyncError(
        f"no room for the weights in {folder}: {nbytes or 'an unknown number of'} bytes needed, "
        f"{shutil.disk_usage(folder).free} free. Old and new weights lie there together; enlarge /dev/shm "
        "(in a pod: a memory emptyDir on /dev/shm)"
    )
