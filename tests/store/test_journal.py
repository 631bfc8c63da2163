from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tidemill.errors import StoreError, StoreGapError
from tidemill.store.journal import SEGMENT_BYTES, JournalReader, JournalWriter
from tidemill.store.object_store import ObjectStore, StoredObject

PREFIX = "runs/a/attempts/1/events"


class AwayStore(ObjectStore):
    """Fails puts until `back` is set; the first one is stored, but its answer is lost."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.back, self.tried = threading.Event(), threading.Event()

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        if self.back.is_set():
            return super().put_bytes(key, data)
        if not self.tried.is_set():
            super().put_bytes(key, data)
        self.tried.set()
        raise StoreError("away")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def writer(store: ObjectStore, path: Path, segment_bytes: int = SEGMENT_BYTES) -> JournalWriter:
    return JournalWriter(store, PREFIX, path, interval_s=0.01, close_timeout_s=120, segment_bytes=segment_bytes)


def test_appended_lines_arrive_in_order_and_complete(store: ObjectStore, tmp_path: Path) -> None:
    path, reader, read = tmp_path / "events.jsonl", JournalReader(store, PREFIX), b""
    with writer(store, path):
        for number in range(20):
            append(path, f"line {number}\nhalf of")
            append(path, f" {number}\n")
            read += reader.read()
        append(path, "the end")
    read += reader.read()
    assert read == path.read_bytes()
    assert reader.read() == b""


def test_a_line_is_uploaded_when_it_is_complete(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    path, reader = tmp_path / "log.txt", JournalReader(seaweedfs, PREFIX)
    uploads = writer(seaweedfs, path)
    append(path, "one\ntw")
    assert uploads.upload(to_the_end=False) and reader.read() == b"one\n"
    append(path, "o\n")
    assert uploads.upload(to_the_end=False) and reader.read() == b"two\n"
    assert [item.key for item in seaweedfs.list(PREFIX)] == [f"{PREFIX}/000000000000.txt", f"{PREFIX}/000000000004.txt"]


def test_a_line_longer_than_a_segment_is_cut(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    append(path, "0123456789\nab\nc")
    writer(seaweedfs, path, segment_bytes=8).upload(to_the_end=False)
    assert [seaweedfs.get_bytes(item.key) for item in seaweedfs.list(PREFIX)] == [b"01234567", b"89\nab\n"]


def test_nothing_is_lost_or_doubled_while_the_store_is_away(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    path, away = tmp_path / "events.jsonl", AwayStore(seaweedfs)
    append(path, "before\n")
    with writer(away, path):
        assert away.tried.wait(60)
        first = JournalReader(seaweedfs, PREFIX)
        assert first.read() == b"before\n"  # stored, although its answer was lost
        append(path, "meanwhile\n")
        away.back.set()
    assert first.read() == b"meanwhile\n"


def test_writer_of_the_same_file_continues_after_the_stored_segments(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, "one\n")
    with writer(seaweedfs, path):
        pass
    append(path, "two\n")
    with writer(seaweedfs, path):
        pass
    assert JournalReader(seaweedfs, PREFIX).read() == b"one\ntwo\n"


def test_writer_of_a_new_file_continues_after_the_stored_segments(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    for name, text in (("a", "a long first file\n"), ("b", "new\n")):
        path = tmp_path / name / "events.jsonl"
        path.parent.mkdir()
        append(path, text)
        with writer(seaweedfs, path):
            pass
    assert JournalReader(seaweedfs, PREFIX).read() == b"a long first file\nnew\n"


def test_a_new_file_that_grows_before_the_store_answers_is_not_taken_for_the_old_one(
    seaweedfs: ObjectStore, tmp_path: Path
) -> None:
    seaweedfs.put_bytes(f"{PREFIX}/000000000000.jsonl", b"old\n")
    path = tmp_path / "events.jsonl"
    uploads = writer(seaweedfs, path)
    append(path, "longer than the old one\n")
    assert uploads.upload(to_the_end=False)
    assert JournalReader(seaweedfs, PREFIX).read() == b"old\nlonger than the old one\n"


@pytest.mark.parametrize("offset", [0, 3, 4, 9])
def test_reader_starts_at_any_offset(seaweedfs: ObjectStore, tmp_path: Path, offset: int) -> None:
    path = tmp_path / "events.jsonl"
    for text in ("one\n", "two\n", "three\n"):
        append(path, text)
        with writer(seaweedfs, path):
            pass
    reader = JournalReader(seaweedfs, PREFIX, offset)
    assert reader.read() == path.read_bytes()[offset:]
    assert reader.offset == path.stat().st_size


def test_segments_before_and_behind_a_gap_can_be_read(seaweedfs: ObjectStore) -> None:
    seaweedfs.put_bytes(f"{PREFIX}/000000000000.jsonl", b"one\n")
    seaweedfs.put_bytes(f"{PREFIX}/000000000010.jsonl", b"three\n")
    reader = JournalReader(seaweedfs, PREFIX)
    assert reader.read() == b"one\n"
    with pytest.raises(StoreGapError, match="lacks the bytes 4 to 10") as caught:
        reader.read()
    reader.offset = caught.value.end
    assert reader.read() == b"three\n"
    seaweedfs.put_bytes(f"{PREFIX}/notes.txt", b"?")
    with pytest.raises(StoreError, match="no segment of a journal"):
        JournalReader(seaweedfs, PREFIX, 16).read()
