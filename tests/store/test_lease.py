from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.actors.ranks import RankActor
from tidemill.config.run import RunConfig
from tidemill.errors import CheckpointError, RunError, StoreError
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.lease import Claim, Fence, lease_key, leased, next_claim, remove_lease, reserve
from tidemill.store.object_store import ObjectStore, StoredObject
from tidemill.store.server import open_store


def fence(store: ObjectStore, attempt: int) -> Fence:
    return Fence(store, "a", Claim(attempt, secrets.token_hex(4)))


def test_an_older_attempt_loses_the_lease_and_commits_nothing_more(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    old, new = fence(seaweedfs, 1), fence(seaweedfs, 2)
    (tmp_path / "model").write_text("weights")
    old.take()
    Checkpoints(seaweedfs, "a", 2, old.claim).commit(3, tmp_path, {})
    new.take()
    late = Checkpoints(seaweedfs, "a", 2, old.claim)
    for write in (lambda: late.commit(4, tmp_path, {}), lambda: late.publish_model(4, tmp_path)):
        with pytest.raises(CheckpointError, match="attempt 1 of a may not commit: attempt 2 took the lease"):
            write()
    assert Checkpoints(seaweedfs, "a", 2).versions() == [3]
    Checkpoints(seaweedfs, "a", 2, new.claim).commit(4, tmp_path, {})
    assert Checkpoints(seaweedfs, "a", 2).versions() == [4, 3]


def test_an_older_attempt_publishes_no_weights_either(run_config: RunConfig) -> None:
    rank = RankActor(run_config, "none", 0, Claim(1, "x"))
    with open_store(run_config.store, run_config.output) as store:
        Fence(store, run_config.name, Claim(2, "x")).take()
        for publish in (lambda: rank.upload_weights(3), rank.upload_snapshot):
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


def test_a_late_attempt_does_not_start(seaweedfs: ObjectStore) -> None:
    took = "attempt 1 of a may not start: attempt 2 took the lease"
    with leased(seaweedfs, "a", Claim(2, "x")), pytest.raises(RunError, match=took):
        fence(seaweedfs, 1).take()
    with pytest.raises(RunError, match="attempt 2 released the lease"):
        fence(seaweedfs, 1).take()


def test_the_last_of_two_processes_of_one_attempt_holds_the_lease(seaweedfs: ObjectStore) -> None:
    first, second = fence(seaweedfs, 1), fence(seaweedfs, 1)
    first.take()
    second.take()
    second.check()
    with pytest.raises(CheckpointError, match="attempt 1 took the lease"):
        first.check()
    first.release()  # without effect
    second.check()


def test_taking_a_held_lease_again_changes_nothing(seaweedfs: ObjectStore) -> None:
    mine = fence(seaweedfs, 1)
    mine.take()
    before = mine.read()
    mine.take()
    assert mine.read() == before


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


def test_an_invalid_lease_is_refused(seaweedfs: ObjectStore) -> None:
    seaweedfs.put_bytes(lease_key("a"), b"{}")
    with pytest.raises(StoreError, match="is no lease of a run"):
        fence(seaweedfs, 1).take()


def test_one_of_many_reserves_the_name_of_a_new_run(store: ObjectStore) -> None:
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: reserve(store, "a"), range(16))) == 1
    with leased(store, "a", Claim(1, "x")):
        assert not reserve(store, "a")


def test_an_unnumbered_claim_is_newer_than_all_earlier_ones(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("weights")
    assert reserve(seaweedfs, "a")
    first = next_claim(seaweedfs, "a")
    with leased(seaweedfs, "a", first):
        second = next_claim(seaweedfs, "a")
        with leased(seaweedfs, "a", second):
            Checkpoints(seaweedfs, "a", 2, second).commit(3, tmp_path, {})
            with pytest.raises(CheckpointError, match="attempt 1 of a may not commit: attempt 2 took"):
                Checkpoints(seaweedfs, "a", 2, first).commit(4, tmp_path, {})
    assert next_claim(seaweedfs, "a").attempt == 3
