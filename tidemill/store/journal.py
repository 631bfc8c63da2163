"""A growing file that others follow through the object store.

    events.jsonl ─► JournalWriter (a thread) ─► PREFIX/000000000000.jsonl, PREFIX/000000004096.jsonl ─► JournalReader

A segment holds the bytes from its offset on and is never changed. Segments end with a line, except where a line is
longer than a segment and at the end of the file.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tidemill.errors import StoreError, StoreGapError
from tidemill.store.object_store import ListedObject, ObjectStore

INTERVAL_S = 3.0
CLOSE_TIMEOUT_S = 30.0
SEGMENT_BYTES = 4 << 20

log = logging.getLogger(__name__)


class JournalWriter:
    """Ships what a file grows by, from a thread of its own: whoever writes to the file never waits for the store.

    A context manager; it ships the rest when the body ends, for at most `close_timeout_s`. While the store is away it
    tries again, always with the same bytes, because a put whose answer was lost may have been made.

    Args:
        store: where to.
        prefix: folder of the segments.
        path: the file; its suffix is that of the segments. It may not exist yet.
        interval_s: between two looks at the file.
        close_timeout_s: for the rest.

    A journal that has segments already goes on behind them: with the same file if that is still there, else with a new
    one from its beginning.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        path: Path,
        interval_s: float = INTERVAL_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.store, self.prefix, self.path = store, prefix, path
        self.interval_s, self.close_timeout_s = interval_s, close_timeout_s
        self.found = path.stat().st_size if path.exists() else 0  # later it may have grown as long as another one was
        self.offset: int | None = None  # of the next segment in the journal
        self.position = 0  # of the same byte in the file
        self.unsent = b""
        self.failing = False
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, name=f"journal-{path.name}", daemon=True)

    def __enter__(self) -> JournalWriter:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self.thread.join(self.close_timeout_s)
        if self.thread.is_alive():
            log.warning("the end of %s did not reach %s", self.path, self.store.uri(self.prefix))

    def run(self) -> None:
        """Look and ship until closed and all is shipped."""
        while True:
            closing = self.closing.is_set()
            shipped = self.ship(to_the_end=closing)
            if closing and shipped:
                return
            if closing:
                time.sleep(self.interval_s)
            else:
                self.closing.wait(self.interval_s)

    def ship(self, *, to_the_end: bool) -> bool:
        """Ship what there is; whether all of it arrived."""
        try:
            if self.offset is None:
                self.offset = self.begin()
            while self.unsent or self.take(to_the_end=to_the_end):
                self.store.put_bytes(self.key(self.offset), self.unsent)
                self.offset += len(self.unsent)
                self.unsent = b""
        except (StoreError, OSError) as error:
            if not self.failing:
                log.warning("%s does not reach the store; trying again: %s", self.path, error)
            self.failing = True
            return False
        self.failing = False
        return True

    def begin(self) -> int:
        """Where the journal goes on; the file is taken up there if it is the same one."""
        segments = self.store.list(self.prefix)
        end = end_of(segments[-1]) if segments else 0
        if self.found >= end:
            self.position = end
        return end

    def take(self, *, to_the_end: bool) -> bool:
        """Read the next segment into `unsent`; whether there is one."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(SEGMENT_BYTES)
        whole = data.rfind(b"\n") + 1
        if whole or not (to_the_end or len(data) == SEGMENT_BYTES):
            data = data[:whole]
        self.unsent = data
        self.position += len(data)
        return bool(data)

    def key(self, offset: int) -> str:
        """Of the segment that begins there."""
        return f"{self.prefix}/{offset:012d}{self.path.suffix}"


@dataclass(slots=True)
class JournalReader:
    """Reads a journal piece by piece; a reader that begins anew goes on at the `offset` of the one before it.

    Attributes:
        store: where it lies.
        prefix: folder of the segments.
        offset: of the next byte; 0 reads from the beginning.
        last: key of the segment that was read last, if one was.
    """

    store: ObjectStore
    prefix: str
    offset: int = 0
    last: str = ""

    def read(self) -> bytes:
        """What has been added since the last call, or since `offset`; empty if nothing.

        Raises:
            StoreGapError: segments are missing; `offset` may be set behind them.
            StoreError: the store cannot be reached.
        """
        pieces: list[bytes] = []
        for segment in self.store.list(self.prefix, after=self.before()):
            if start_of(segment) > self.offset and any(pieces):
                break  # what was read counts; the next call tells of the gap
            pieces.append(self.piece(segment))
        return b"".join(pieces)

    def before(self) -> str:
        """A key behind which the segment lies that begins at `offset`, or holds it."""
        if self.last or self.offset == 0:
            return self.last
        # Segments are at most this long, so that none which begins earlier reaches as far as `offset`.
        return f"{self.prefix}/{max(0, self.offset - SEGMENT_BYTES):012d}"

    def piece(self, segment: ListedObject) -> bytes:
        """What a segment has behind `offset`, which moves to its end."""
        start, end = start_of(segment), end_of(segment)
        if end <= self.offset:
            return b""
        if start > self.offset:
            raise StoreGapError(f"{self.store.uri(self.prefix)} lacks the bytes {self.offset} to {start}", start)
        data = self.store.get_bytes(segment.key)[self.offset - start :]
        self.offset, self.last = end, segment.key
        return data


def start_of(segment: ListedObject) -> int:
    """Offset of its first byte.

    Raises:
        StoreError: its name says none.
    """
    number = segment.key.rpartition("/")[2].partition(".")[0]
    if not number.isdecimal():
        raise StoreError(f"{segment.key} is no segment of a journal")
    return int(number)


def end_of(segment: ListedObject) -> int:
    """Offset behind its last byte."""
    return start_of(segment) + segment.nbytes
