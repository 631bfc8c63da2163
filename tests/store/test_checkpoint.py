import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.run import RunConfig
from tidemill.errors import CheckpointError, StoreError
from tidemill.store.checkpoint import Checkpoints, Manifest, open_checkpoints
from tidemill.store.object_store import ObjectStore, StoredObject


class Crash(BaseException):
    """The process is killed."""


class CrashingStore(ObjectStore):
    """Crashes after so many operations that change the store."""

    def __init__(self, store: ObjectStore, operations: int) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.left = operations

    def spend(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    def put_stream(self, key: str, file: Any, nbytes: int) -> StoredObject:
        self.spend()
        return super().put_stream(key, file, nbytes)

    def delete(self, key: str) -> None:
        self.spend()
        super().delete(key)

    def delete_prefix(self, prefix: str) -> int:
        for item in self.list(prefix):
            self.delete(item.key)
        return 0


def write_parts(folder: Path, version: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(f"weights {version}".encode() * 1000)
    (folder / "optimizer.safetensors").write_bytes(f"moments {version}".encode() * 1000)
    return folder


def commit(store: ObjectStore, tmp_path: Path, version: int, keep: int = 2) -> str:
    return Checkpoints(store, "run", keep).commit(
        version, write_parts(tmp_path / "made", version), {"version": version}
    )


def restored(store: ObjectStore, tmp_path: Path) -> tuple[int, bytes, Any] | None:
    """Version, weights and state after a restart."""
    checkpoints = Checkpoints(store, "run", 2)
    found = checkpoints.newest_valid()
    if found is None:
        return None
    assert checkpoints.load(found[0], tmp_path / "loaded") == found[1]
    return found[0], (tmp_path / "loaded" / "model.safetensors").read_bytes(), found[1]["version"]


def newest(checkpoints: Checkpoints) -> int | None:
    found = checkpoints.newest_valid(tensors=False)
    return None if found is None else found[0]


def expected(version: int) -> tuple[int, bytes, int]:
    return version, f"weights {version}".encode() * 1000, version


def part_key(store: ObjectStore, version: int, name: str) -> str:
    return next(i.key for i in store.list(f"runs/run/checkpoints/{version:08d}") if i.key.endswith(name))


def test_a_commit_is_loaded(store: ObjectStore, tmp_path: Path) -> None:
    state = {"ledger": {"next": 3, "open": [1, 2]}, "text": "Gezeitenmühle"}
    checkpoints = Checkpoints(store, "run", 2)
    assert newest(checkpoints) is None
    assert checkpoints.newest_valid() is None
    uri = checkpoints.commit(7, write_parts(tmp_path / "made", 7), state)
    assert uri == f"s3://{store.bucket}/runs/run/checkpoints/00000007"
    assert newest(checkpoints) == 7
    assert checkpoints.load(7, tmp_path / "loaded") == state
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "loaded" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("version", [2, 3], ids=["same version again", "next version"])
def test_a_crash_at_any_moment_leaves_a_commit(seaweedfs: ObjectStore, tmp_path: Path, version: int, keep: int) -> None:
    crashed, survivors = True, []
    operations = 0
    while crashed:
        commit(seaweedfs, tmp_path, 1, keep)
        commit(seaweedfs, tmp_path, 2, keep)
        try:
            commit(CrashingStore(seaweedfs, operations), tmp_path, version, keep)
            crashed = False
        except Crash:
            operations += 1
        survivor = restored(seaweedfs, tmp_path)
        assert survivor in (expected(2), expected(version))
        survivors.append(survivor)
        commit(seaweedfs, tmp_path, version, keep)  # the restart repeats the commit
        assert restored(seaweedfs, tmp_path) == expected(version)
        seaweedfs.delete_prefix("runs/run")
    assert operations >= 5
    assert (survivors[0], survivors[-1]) == (expected(2), expected(version))


def test_without_a_manifest_there_is_no_commit(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    commit(seaweedfs, tmp_path, 1)
    with pytest.raises(Crash):
        commit(CrashingStore(seaweedfs, 3), tmp_path, 2)
    assert len(seaweedfs.list("runs/run/checkpoints/00000002")) == 3
    assert newest(Checkpoints(seaweedfs, "run", 2)) == 1
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Checkpoints(seaweedfs, "run", 2).load(2, tmp_path / "x")


def test_old_and_incomplete_commits_are_deleted(store: ObjectStore, tmp_path: Path) -> None:
    for operations, version in ((3, 1), (99, 2), (99, 3), (2, 3), (99, 4)):
        try:
            commit(CrashingStore(store, operations), tmp_path, version)
        except Crash:
            continue
    assert Checkpoints(store, "run", 2).versions() == [4, 3]
    commit(store, tmp_path, 5, keep=1)
    keys = [item.key for item in store.list("runs/run/checkpoints")]
    assert len(keys) == 4
    assert all(key.startswith("runs/run/checkpoints/00000005/") for key in keys)


def test_an_incomplete_upload_does_not_count_as_a_kept_commit(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    commit(seaweedfs, tmp_path, 1)
    with pytest.raises(Crash):
        commit(CrashingStore(seaweedfs, 2), tmp_path, 2)
    commit(seaweedfs, tmp_path, 3)
    assert Checkpoints(seaweedfs, "run", 2).versions() == [3, 1]


def test_committing_a_version_again_replaces_it(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    commit(seaweedfs, tmp_path, 1)
    folder = write_parts(tmp_path / "made", 9)
    Checkpoints(seaweedfs, "run", 2).commit(1, folder, {"version": 1})
    assert restored(seaweedfs, tmp_path) == (1, b"weights 9" * 1000, 1)
    assert len(seaweedfs.list("runs/run/checkpoints")) == 4


def flip(store: ObjectStore, key: str) -> None:
    data = bytearray(store.get_bytes(key))
    data[len(data) // 2] ^= 1
    store.put_bytes(key, bytes(data))


def cut(store: ObjectStore, key: str) -> None:
    store.put_bytes(key, store.get_bytes(key)[:-1])


@pytest.mark.parametrize("damage", [flip, cut, ObjectStore.delete], ids=["flipped bit", "cut off", "deleted"])
@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_part_is_named_and_the_commit_before_is_used(
    seaweedfs: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, part: str
) -> None:
    commit(seaweedfs, tmp_path, 1)
    commit(seaweedfs, tmp_path, 2)
    damage(seaweedfs, part_key(seaweedfs, 2, part))
    with pytest.raises(CheckpointError, match=part):
        Checkpoints(seaweedfs, "run", 2).load(2, tmp_path / "loaded")
    assert not list((tmp_path / "loaded").glob("*"))
    with caplog.at_level(logging.WARNING):
        assert restored(seaweedfs, tmp_path) == expected(1)
    assert part in caplog.text


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 99}', b'{"format": 1}'])
def test_a_damaged_manifest_is_skipped(seaweedfs: ObjectStore, tmp_path: Path, damage: bytes) -> None:
    commit(seaweedfs, tmp_path, 1)
    commit(seaweedfs, tmp_path, 2)
    seaweedfs.put_bytes("runs/run/checkpoints/00000002/manifest.json", damage)
    assert newest(Checkpoints(seaweedfs, "run", 2)) == 1
    assert restored(seaweedfs, tmp_path) == expected(1)


def test_only_damaged_commits_are_an_error_and_not_a_fresh_start(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    commit(seaweedfs, tmp_path, 1)
    flip(seaweedfs, part_key(seaweedfs, 1, "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"\[1\].*under another run name"):
        restored(seaweedfs, tmp_path)


def test_a_commit_after_falling_back_removes_the_damaged_future(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    for version in (10, 20):
        commit(seaweedfs, tmp_path, version)
    cut(seaweedfs, part_key(seaweedfs, 20, "model.safetensors"))
    assert restored(seaweedfs, tmp_path) == expected(10)
    commit(seaweedfs, tmp_path, 15)
    assert Checkpoints(seaweedfs, "run", 2).versions() == [15, 10]


def test_runs_do_not_see_each_other(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    commit(seaweedfs, tmp_path, 1)
    assert newest(Checkpoints(seaweedfs, "ru", 2)) is None
    assert newest(Checkpoints(seaweedfs, "run-2", 2)) is None
    key = "runs/other/checkpoints/00000001/manifest.json"
    seaweedfs.put_bytes(key, seaweedfs.get_bytes("runs/run/checkpoints/00000001/manifest.json"))
    with pytest.raises(CheckpointError, match="is of run version 1"):
        Checkpoints(seaweedfs, "other", 2).load(1, tmp_path / "x")


def test_an_unreachable_store_is_not_taken_for_a_missing_checkpoint() -> None:
    class Gone(ObjectStore):
        def list(self, prefix: str, after: str = "") -> tuple[()]:
            raise StoreError("gone")

    with pytest.raises(StoreError, match="gone"):
        Checkpoints(Gone(None, "http://x", "bucket"), "run", 2).newest_valid()


def test_a_state_that_is_not_json_is_refused_before_anything_is_stored(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="JSON"):
        Checkpoints(seaweedfs, "run", 2).commit(1, write_parts(tmp_path / "made", 1), {"x": object()})
    (tmp_path / "made" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="rename"):
        Checkpoints(seaweedfs, "run", 2).commit(1, tmp_path / "made", {})
    assert seaweedfs.list("") == ()


def test_a_manifest_reads_back() -> None:
    manifest = Manifest(1, "run", 3, "folder", (StoredObject("a", 1, "b"),))
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_published_model_replaces_an_earlier_upload(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "old").write_text("")
    checkpoints = Checkpoints(seaweedfs, "run", 2)
    checkpoints.publish_model(4, tmp_path / "hf")
    os.unlink(tmp_path / "hf" / "old")
    assert checkpoints.publish_model(4, tmp_path / "hf") == f"s3://{seaweedfs.bucket}/runs/run/model/4"
    assert [item.key for item in seaweedfs.list("runs")] == ["runs/run/model/4/config.json"]


def test_an_incomplete_upload_keeps_the_published_model(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).write_text(name)
    Checkpoints(seaweedfs, "run", 2).publish_model(4, tmp_path / "hf")
    for operations in range(2):
        with pytest.raises(Crash):
            Checkpoints(CrashingStore(seaweedfs, operations), "run", 2).publish_model(4, tmp_path / "hf")
        for name in ("config.json", "model.safetensors"):
            assert seaweedfs.get_bytes(f"runs/run/model/4/{name}") == name.encode()


def test_the_store_of_a_run_holds_its_checkpoints(run_config: RunConfig, tmp_path: Path) -> None:
    with open_checkpoints(run_config) as checkpoints:
        checkpoints.commit(1, write_parts(tmp_path / "made", 1), {"version": 1})
        with open_checkpoints(run_config) as again:
            assert newest(again) == 1
