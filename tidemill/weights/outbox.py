"""Where the trainer puts a version for the engines to fetch, by `sync.transport`."""

from __future__ import annotations

import errno
import fcntl
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tidemill.errors import CheckpointError, StoreError, SyncError
from tidemill.protocols import WeightUpdate
from tidemill.store.lease import Fence
from tidemill.store.object_store import ObjectStore

log = logging.getLogger(__name__)
Export = Callable[[Path], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that engines can fetch, and metrics of how it got there."""

    update: WeightUpdate
    metrics: Mapping[str, float] = field(default_factory=dict)


class Outbox(Protocol):
    """One transport, seen from the trainer."""

    async def export(self) -> None:
        """Write the trainer's present weights down; they may change when this returns.

        Raises:
            SyncError: no room, or the export is not whole.
        """
        ...

    async def send(self, version: int) -> Publication:
        """Let engines fetch what was exported last, as `version`.

        Raises:
            StoreError: the object store failed.
        """
        ...

    async def snapshot(self) -> Publication:
        """The newest version again, in a form that depends on nothing else."""
        ...

    def retire(self, update: WeightUpdate) -> None:
        """No engine will fetch this one any more."""
        ...

    def close(self) -> None:
        """Free everything; engines keep the weights they adopted."""
        ...


class MemoryOutbox:
    """`shared_memory`: files that the engines of this host map, `weights.mapped_weights`.

    Two of them take turns: the one of the newest version, and the spare, which was that of the version before it and is
    written again for the next. A spare that some engine still reads, because it was too slow or was given up, is
    deleted instead and lives on for that engine alone. So the memory of two versions is used all the time.

    Args:
        folder: of its own, on a memory-backed file system; made here, removed by `close`.
        export: writes the trainer's weights to a safetensors file and returns its size in bytes.
        expected_nbytes: size of an export, so that room is checked before the first one too.
    """

    def __init__(self, folder: Path, export: Export, expected_nbytes: int = 0) -> None:
        self._folder, self._export, self._nbytes = folder, export, expected_nbytes
        self._spare = folder / "spare.safetensors"
        self._newest: Publication | None = None
        # A run that was killed may have left its files here.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    async def export(self) -> None:
        """See `Outbox`."""
        with alone(self._spare) as reusable:
            if not reusable:
                self._spare.unlink(missing_ok=True)
                check_room(self._folder, self._nbytes)
            await self._fill_spare()

    async def send(self, version: int) -> Publication:
        """See `Outbox`. Only now has the version a name; before, no engine could open it by one."""
        path = self._folder / f"v{version}.safetensors"
        self._spare.rename(path)
        self._newest = Publication(WeightUpdate(version, str(path), self._nbytes))
        return self._newest

    async def _fill_spare(self) -> None:
        """Have the trainer write its weights there."""
        with room_in(self._folder, self._nbytes):
            self._nbytes = await self._export(self._spare)
        if not self._spare.is_file() or self._spare.stat().st_size != self._nbytes:
            raise SyncError(f"the export of the weights announced {self._nbytes} bytes and left another file")

    async def snapshot(self) -> Publication:
        """See `Outbox`; a file is whole by itself."""
        assert self._newest is not None
        return self._newest

    def retire(self, update: WeightUpdate) -> None:
        """See `Outbox`; its file is the spare now."""
        Path(update.path).rename(self._spare)

    def close(self) -> None:
        """See `Outbox`."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class StoreOutbox:
    """`object_store`: the trainer uploads by itself, `weights.publisher`, because it may be on another host.

    Attributes:
        write: has the trainer write its weights to a file of its host.
        upload: has it upload that file as a version, beside its work.
        republish: has it upload the newest version again, whole.
        store: of the run.
        prefix: key below which the weights of the run lie.
        fence: of the run's lease; whoever lost it leaves the weights to the attempt that has it.
    """

    write: Callable[[], Awaitable[None]]
    upload: Callable[[int], Awaitable[Publication]]
    republish: Callable[[], Awaitable[Publication]]
    store: ObjectStore
    prefix: str
    fence: Fence | None = None

    async def export(self) -> None:
        """See `Outbox`."""
        await self.write()

    async def send(self, version: int) -> Publication:
        """See `Outbox`.

        Raises:
            StoreError: the store failed; the version before is intact.
        """
        try:
            return await self.upload(version)
        except StoreError as error:
            raise type(error)(f"version {version} could not be published through the object store: {error}") from error

    async def snapshot(self) -> Publication:
        """See `Outbox`; raises as `send`."""
        try:
            return await self.republish()
        except StoreError as error:
            raise type(error)(f"the newest version could not be published as a snapshot: {error}") from error

    def retire(self, update: WeightUpdate) -> None:
        """Nothing: later deltas may need it, so the publisher decides."""

    def close(self) -> None:
        """See `Outbox`. What matters of a run is its checkpoint, so a failure here costs space and not the run."""
        try:
            if self.fence is not None:
                self.fence.check()
            self.store.delete_prefix(self.prefix)
        except (StoreError, CheckpointError) as error:
            log.warning("published weights could not be deleted: %s", error)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Lock a file to have it written again; False where it is still read, or is not there."""
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
    """Refuse to write what will not fit.

    Raises:
        SyncError: naming the folder, what is needed and what is there.
    """
    if shutil.disk_usage(folder).free < nbytes:
        raise no_room(folder, nbytes)


@contextmanager
def room_in(folder: Path, nbytes: int) -> Iterator[None]:
    """Say what to do where the weights that the body writes turn out not to fit.

    Raises:
        SyncError: as `check_room`.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(folder, nbytes) from error


def no_room(folder: Path, nbytes: int) -> SyncError:
    """The error for a memory-backed folder that cannot take another `nbytes`; 0 is unknown."""
    return SyncError(
        f"no room for the weights in {folder}: {nbytes or 'an unknown number of'} bytes needed, "
        f"{shutil.disk_usage(folder).free} free. Old and new weights lie there together; enlarge /dev/shm "
        "(in a pod: a memory emptyDir on /dev/shm)"
    )
