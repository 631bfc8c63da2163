from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tidemill.actors.ranks import RankActor
from tidemill.config.run import RunConfig
from tidemill.errors import CheckpointError, RunError, StoreError
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.conditional_put import Record
from tidemill.store.lease import Claim, Fence, lease_key, leased, next_claim, remove_lease, reserve
from tidemill.store.object_store import ObjectStore, StoredObject


def fence(store: ObjectStore, attempt: int) -> Fence:
    return Fence(store, "a", Claim(attempt, secrets.token_hex(4)))


def test_a_record_is_changed_only_by_who_saw_its_last_state(store: ObjectStore) -> None:
    record = Record(store, "runs/a/lease")
    assert record.read() is None
    assert record.write(b"one", None)
    first = record.read()
    assert first is not None and first.data == b"one"
    assert not record.write(b"two", None)
    assert record.write(b"two", first)
    assert not record.write(b"three", first)
    store.delete(record.key)
    assert not record.write(b"three", first)
    assert not store.exists(record.key)


def test_of_many_that_write_at_once_one_wins(store: ObjectStore) -> None:
    record = Record(store, "runs/a/lease")
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: record.write(f"{n}".encode(), None), range(16))) == 1
    seen = record.read()
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: record.write(f"next {n}".encode(), seen), range(16))) == 1


def test_an_older_attempt_loses_the_lease_and_commits_nothing_more(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    old, new = fence(seaweedfs, 1), fence(seaweedfs, 2)
    (tmp_path / "model").write_text("weights")
    old.take()
    Checkpoints(seaweedfs, "a", 2, old.claim).commit(3, tmp_path, {})
    new.take()
    late = Checkpoints(seaweedfs, "a", 2, old.claim)
    for write in (lambda: late.commit(4, tmp_path, {}), lambda: late.publish_model(4, tmp_path)):
        with pytest.raises(CheckpointError, match="attempt 1 of a commits nothing any more: attempt 2 took the lease"):
            write()
    assert Checkpoints(seaweedfs, "a", 2).versions() == [3]
    Checkpoints(seaweedfs, "a", 2, new.claim).commit(4, tmp_path, {})
    assert Checkpoints(seaweedfs, "a", 2).versions() == [4, 3]


class Rank(RankActor):
    """A trainer rank whose store is given."""

    bucket: ObjectStore

    def store(self) -> AbstractContextManager[ObjectStore]:
        return nullcontext(self.bucket)


def test_an_older_attempt_publishes_no_weights_either(seaweedfs: ObjectStore, run_config: RunConfig) -> None:
    old, new = (Fence(seaweedfs, run_config.name, Claim(attempt, "x")) for attempt in (1, 2))
    rank = Rank(run_config, "none", 0, old.claim)
    rank.bucket = seaweedfs
    new.take()
    for publish in (lambda: rank.upload_weights(3), rank.republish_weights):
        with pytest.raises(CheckpointError, match="attempt 2 took the lease"):
            publish()


def test_a_lease_that_is_lost_during_the_upload_leaves_no_commit(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    old = fence(seaweedfs, 1)
    old.take()

    class Slow(ObjectStore):
        def upload_folder(self, folder: Path, prefix: str) -> tuple[StoredObject, ...]:
            fence(seaweedfs, 2).take()
            return super().upload_folder(folder, prefix)

    (tmp_path / "model").write_text("weights")
    store = Slow(seaweedfs.client, seaweedfs.endpoint, seaweedfs.bucket)
    with pytest.raises(CheckpointError, match="attempt 2 took the lease"):
        Checkpoints(store, "a", 2, old.claim).commit(3, tmp_path, {})
    assert Checkpoints(seaweedfs, "a", 2).versions() == []


def test_an_attempt_that_comes_late_does_not_begin(seaweedfs: ObjectStore) -> None:
    took = "attempt 1 of a does not begin: attempt 2 took the lease"
    with leased(seaweedfs, "a", Claim(2, "x")), pytest.raises(RunError, match=took):
        fence(seaweedfs, 1).take()
    with pytest.raises(RunError, match="attempt 2 gave the lease back"):
        fence(seaweedfs, 1).take()


def test_of_two_processes_of_one_attempt_the_last_one_goes_on(seaweedfs: ObjectStore) -> None:
    first, second = fence(seaweedfs, 1), fence(seaweedfs, 1)
    first.take()
    second.take()
    second.check()
    with pytest.raises(CheckpointError, match="attempt 1 took the lease"):
        first.check()
    first.release()  # is not its own any more
    second.check()


def test_taking_again_what_one_has_changes_nothing(seaweedfs: ObjectStore) -> None:
    mine = fence(seaweedfs, 1)
    mine.take()
    before = mine.record.read()
    mine.take()
    assert mine.record.read() == before


def test_many_processes_of_one_attempt_leave_one_holder(seaweedfs: ObjectStore) -> None:
    fences = [fence(seaweedfs, 3) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(Fence.take, fences))
    holders = 0
    for each in fences:
        try:
            each.check()
        except CheckpointError:
            continue
        holders += 1
    assert holders == 1


def test_a_lease_ends_with_its_removal(seaweedfs: ObjectStore) -> None:
    mine = fence(seaweedfs, 5)
    mine.take()
    remove_lease(seaweedfs, "a")
    remove_lease(seaweedfs, "a")
    with pytest.raises(CheckpointError, match="its lease was removed"):
        mine.check()
    fence(seaweedfs, 1).take()


def test_what_is_no_lease_is_refused(seaweedfs: ObjectStore) -> None:
    seaweedfs.put_bytes(lease_key("a"), b"{}")
    with pytest.raises(StoreError, match="is no lease of a run"):
        fence(seaweedfs, 1).take()


def test_of_many_that_want_a_name_for_a_new_run_one_gets_it(store: ObjectStore) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: reserve(store, "a"), range(16))) == 1
    with leased(store, "a", Claim(1, "x")):
        assert not reserve(store, "a")


def test_a_claim_of_who_does_not_count_goes_before_all_there_were(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("weights")
    assert reserve(seaweedfs, "a")
    first = next_claim(seaweedfs, "a")
    with leased(seaweedfs, "a", first):
        second = next_claim(seaweedfs, "a")
        with leased(seaweedfs, "a", second):
            Checkpoints(seaweedfs, "a", 2, second).commit(3, tmp_path, {})
            with pytest.raises(CheckpointError, match="attempt 1 of a commits nothing any more: attempt 2 took"):
                Checkpoints(seaweedfs, "a", 2, first).commit(4, tmp_path, {})
    assert next_claim(seaweedfs, "a").attempt == 3
