from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.rollout.staleness import StalenessPolicy, too_old


def policy(eta: int = 1, per_version: int = 4, concurrent: int = 1000, **more: int | None) -> StalenessPolicy:
    return StalenessPolicy(eta, per_version, concurrent, **more)


def test_capacity_is_the_formula_of_areal_worked_by_hand() -> None:
    # (eta + v + 1) * B - (accepted + running) = (2 + 3 + 1) * 16 - (60 + 10) = 26; concurrency leaves 32 - 10 = 22
    assert policy(2, 16, 1000).capacity(version=3, running=10, accepted=60) == 26
    assert policy(2, 16, 32).capacity(version=3, running=10, accepted=60) == 22


def test_bound_zero_admits_exactly_one_batch_a_version() -> None:
    synchronous = policy(eta=0, per_version=8)
    for version in range(5):
        assert synchronous.capacity(version, running=0, accepted=8 * version) == 8
        assert synchronous.capacity(version, running=3, accepted=8 * version + 5) == 0


def test_capacity_is_never_negative() -> None:
    assert policy().capacity(version=0, running=50, accepted=50) == 0


def test_the_bound_of_verl_counts_as_in_its_documentation() -> None:
    # (1 + 0.5) * 4 steps * 1 batch * 32 groups = 192 between two syncs
    verl = policy(eta=5, per_version=128, max_groups_between_syncs=192)
    assert verl.capacity(version=0, running=0, accepted=0) == 192
    # at the sync 128 were trained, 40 are queued and 24 running: they count, 128 may be added
    assert verl.capacity(version=1, running=24, accepted=128 + 40) == 128


def test_no_more_groups_start_than_the_run_trains() -> None:
    assert policy(total=6).capacity(version=1, running=1, accepted=3) == 2


@pytest.mark.parametrize(("oldest", "version", "bound", "old"), [(3, 4, 1, False), (3, 5, 1, True), (3, 3, 0, False)])
def test_age_is_counted_from_the_oldest_token(oldest: int, version: int, bound: int, old: bool) -> None:
    assert too_old(oldest, version, bound) is old


@given(seed=st.integers(0, 2**32), eta=st.integers(0, 4), per_version=st.integers(1, 8))
def test_drops_and_failures_leak_no_capacity(seed: int, eta: int, per_version: int) -> None:
    rng, admit = random.Random(seed), policy(eta, per_version)
    running = queued = trained = version = 0
    for _ in range(200):
        running += admit.capacity(version, running, trained + queued)
        lost = rng.randint(0, running)  # dropped, re-issued, timed out or quarantined
        running -= lost
        assert admit.capacity(version, running, trained + queued) >= lost
        finished = rng.randint(0, running)
        running, queued = running - finished, queued + finished
        if queued >= per_version:
            queued, trained, version = queued - per_version, trained + per_version, version + 1
    assert running + queued <= (eta + 1) * per_version


@given(eta=st.integers(0, 3), per_version=st.integers(1, 5))
def test_groups_trained_in_order_of_start_never_exceed_the_bound(eta: int, per_version: int) -> None:
    started: list[int] = []  # version at the start of each group
    for version in range(10):
        trained = version * per_version
        room = policy(eta, per_version).capacity(version, running=len(started) - trained, accepted=trained)
        started += [version] * room
        batch = started[trained : trained + per_version]
        assert len(batch) == per_version
        assert not any(too_old(v, version, eta) for v in batch)
