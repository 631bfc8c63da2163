"""A growing file that readers on other machines follow through the object store.

    events.jsonl ─► JournalWriter (a thread) ─► PREFIX/000000000000.jsonl, PREFIX/000000004096.jsonl ─► JournalReader

A segment holds the bytes from its offset on and never changes. Segments end with a line, except within a line that is
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
    """Uploads the growth of a file from its own thread, so that writers of the file never wait for the store.

    A context manager: at the end of the body it uploads the rest, within `close_timeout_s`. While the store is away it
    repeats each put with the same bytes, because the store may have made a put whose answer was lost.

    A journal with segments is continued: with the same file if it still exists, else with a new file from its
    beginning.

    Args:
        store: receives the segments.
        prefix: folder of the segments.
        path: the file, which may not exist yet; the segments have its suffix.
        interval_s: between two reads of the file, in seconds.
        close_timeout_s: for the rest, in seconds.
        segment_bytes: length of the longest segment; at most `SEGMENT_BYTES`, on which readers rely.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        path: Path,
        interval_s: float = INTERVAL_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.store, self.prefix, self.path = store, prefix, path
        self.interval_s, self.close_timeout_s, self.segment_bytes = interval_s, close_timeout_s, segment_bytes
        self.found = path.stat().st_size if path.exists() else 0  # later a new file may be as long as the old one
        self.offset: int | None = None  # of the next segment, in the journal
        self.position = 0  # of the same byte, in the file
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
        while True:
            closing = self.closing.is_set()
            complete = self.upload(to_the_end=closing)
            if closing and complete:
                return
            if closing:
                time.sleep(self.interval_s)
            else:
                self.closing.wait(self.interval_s)

    def upload(self, *, to_the_end: bool) -> bool:
        """Upload the growth of the file; returns whether all of it arrived."""
        try:
            if self.offset is None:
                self.offset = self.begin()
            while self.unsent or self.take(to_the_end=to_the_end):
                self.store.put_bytes(self.key(self.offset), self.unsent)
                self.offset += len(self.unsent)
                self.unsent = b""
        except (StoreError, OSError) as error:
            if not self.failing:
                log.warning("%s cannot be uploaded; trying again: %s", self.path, error)
            self.failing = True
            return False
        self.failing = False
        return True

    def begin(self) -> int:
        """The end of the stored journal; the same file is continued there."""
        segments = self.store.list(self.prefix)
        end = end_of(segments[-1]) if segments else 0
        if self.found >= end:
            self.position = end
        return end

    def take(self, *, to_the_end: bool) -> bool:
        """Read the next segment into `unsent`; returns whether there is one."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(self.segment_bytes)
        whole = data.rfind(b"\n") + 1
        if whole or not (to_the_end or len(data) == self.segment_bytes):
            data = data[:whole]
        self.unsent = data
        self.position += len(data)
        return bool(data)

    def key(self, offset: int) -> str:
        return f"{self.prefix}/{offset:012d}{self.path.suffix}"


@dataclass(slots=True)
class JournalReader:
    """Reads a journal piece by piece; a new reader continues at the `offset` of an earlier one."""

    store: ObjectStore
    prefix: str
    offset: int = 0  # of the next byte
    last: str = ""  # key of the last segment that was read

    def read(self) -> bytes:
        """The bytes added since the last call, or since `offset`; may be empty.

        Raises:
            StoreGapError: segments are missing; the caller may set `offset` behind them.
            StoreError: the store cannot be reached.
        """
        pieces: list[bytes] = []
        for segment in self.store.list(self.prefix, after=self.before()):
            if start_of(segment) > self.offset and any(pieces):
                break  # return the bytes so far; the next call reports the gap
            pieces.append(self.piece(segment))
        return b"".join(pieces)

    def before(self) -> str:
        """A key that sorts before the segment with the byte at `offset`."""
        if self.last or self.offset == 0:
            return self.last
        # No segment is longer, so no segment that begins earlier reaches `offset`.
        return f"{self.prefix}/{max(0, self.offset - SEGMENT_BYTES):012d}"

    def piece(self, segment: ListedObject) -> bytes:
        """The bytes of a segment from `offset` on, which moves to its end."""
        start, end = start_of(segment), end_of(segment)
        if end <= self.offset:
            return b""
        if start > self.offset:
            raise StoreGapError(f"{self.store.uri(self.prefix)} lacks the bytes {self.offset} to {start}", start)
        data = self.store.get_bytes(segment.key)[self.offset - start :]
        self.offset, self.last = end, segment.key
        return data


def start_of(segment: ListedObject) -> int:
    number = segment.key.rpartition("/")[2].partition(".")[0]
    if not number.isdecimal():
        raise StoreError(f"{segment.key} is no segment of a journal")
    return int(number)


def end_of(segment: ListedObject) -> int:
    return start_of(segment) + segment.nbytes
