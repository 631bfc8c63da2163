from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import CheckpointError, RunError
from tidemill.rollout.ledger import Ledger


def dispatch(ledger: Ledger) -> int:
    uid = ledger.next_uid()
    assert uid is not None
    ledger.dispatched(uid)
    return uid


def queue(ledger: Ledger, count: int) -> list[int]:
    uids = [dispatch(ledger) for _ in range(count)]
    for uid in uids:
        ledger.queued(uid)
    return uids


def reloaded(ledger: Ledger) -> Ledger:
    return Ledger.restore(json.loads(json.dumps(ledger.state())), ledger.total)


def test_new_occurrences_come_in_order_until_the_stream_ends() -> None:
    ledger = Ledger(total=3)
    assert [dispatch(ledger) for _ in range(3)] == [0, 1, 2]
    assert ledger.next_uid() is None


def test_dropped_occurrences_are_issued_before_new_ones_lowest_first() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 5)
    ledger.dropped(3, "stale")
    ledger.dropped(1, "stale")
    assert [dispatch(ledger) for _ in range(3)] == [1, 3, 5]


def test_the_lowest_goes_first_whatever_was_taken_from_between() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 8)
    for uid in (0, 5, 1, 6, 7, 2, 3):
        ledger.dropped(uid, "stale")
    ledger.dispatched(0)
    assert [dispatch(ledger) for _ in range(6)] == [1, 2, 3, 5, 6, 7]


def test_failures_of_a_trained_occurrence_are_forgotten() -> None:
    ledger = Ledger(total=None)
    for _ in range(2):
        ledger.failed(dispatch(ledger), "timeout", 3)
    ledger.trained(queue(ledger, 1))
    assert ledger.state() == ledger.state() | {"attempts": {}, "outlasted": {}, "crashed": {}}


def test_looking_at_the_next_occurrence_changes_nothing() -> None:
    ledger = Ledger(total=2)
    assert ledger.next_uid() == ledger.next_uid() == 0


def test_an_occurrence_that_was_passed_over_goes_first_after_a_restart_too() -> None:
    ledger = Ledger(total=6)
    assert ledger.upcoming(4) == [0, 1, 2, 3]
    ledger.dispatched(2)
    assert ledger.upcoming(9) == [0, 1, 3, 4, 5]
    ledger.dispatched(1)
    ledger.check()
    assert ledger.counts()["issued"] == 2
    assert reloaded(ledger).upcoming(9) == [0, 1, 2, 3, 4, 5]
    assert [dispatch(ledger) for _ in range(4)] == [0, 3, 4, 5]


@pytest.mark.parametrize(("uid", "why"), [(1, "it is dispatched"), (0, "trained already"), (3, "not issued yet")])
def test_only_waiting_or_new_occurrences_are_dispatched(uid: int, why: str) -> None:
    ledger = Ledger(total=3)
    ledger.trained(queue(ledger, 1))
    dispatch(ledger)
    with pytest.raises(RunError, match=why):
        ledger.dispatched(uid)


def test_an_occurrence_trained_twice_is_refused() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 1)
    ledger.trained([0])
    with pytest.raises(RunError, match="trained already"):
        ledger.trained([0])


def test_an_occurrence_trained_without_being_queued_is_refused_and_nothing_counted() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 1)
    dispatch(ledger)
    with pytest.raises(RunError, match="it is dispatched"):
        ledger.trained([0, 1])
    assert ledger.trained_count == 0
    ledger.trained([0])


def test_a_batch_that_names_an_occurrence_twice_is_refused() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 1)
    with pytest.raises(RunError, match="twice"):
        ledger.trained([0, 0])


def test_the_third_failure_quarantines_and_earlier_ones_issue_again() -> None:
    ledger = Ledger(total=None)
    fates = []
    for _ in range(3):
        assert dispatch(ledger) == 0
        fates.append(ledger.failed(0, "timeout", max_attempts=3))
    assert fates == [False, False, True]
    assert ledger.next_uid() == 1
    assert ledger.quarantined == {0: "timeout"}
    ledger.check()


def test_an_occurrence_that_outlasts_the_bound_repeatedly_is_quarantined_over_restarts_too() -> None:
    ledger = Ledger(total=1)
    ledger.dispatched(0)
    assert not ledger.outlasted(0, max_attempts=2)
    ledger.dispatched(0)
    ledger.queued(0)  # it did fit, and was swept for another reason
    ledger.dropped(0, "stale")
    ledger.dispatched(0)
    assert not ledger.outlasted(0, max_attempts=2)
    ledger = Ledger.restore(ledger.state(), total=1)
    ledger.dispatched(0)
    assert ledger.outlasted(0, max_attempts=2)
    assert dict(ledger.quarantined) == {0: "never_fits"}
    assert ledger.counts()["dropped/stale"] == 3
    ledger.check()


def test_an_occurrence_that_crashes_one_engine_after_the_other_is_quarantined_over_restarts_too() -> None:
    ledger = Ledger(total=2)
    dispatch(ledger)
    assert not ledger.crashed(0, max_crashes=2)
    dispatch(ledger)
    ledger.queued(0)  # an engine finished it, so it did not cause the crash
    ledger.dropped(0, "stale")
    dispatch(ledger)
    assert (ledger.crashed(0, max_crashes=2), ledger.crashes(0)) == (False, 1)
    ledger = reloaded(ledger)
    dispatch(ledger)
    assert ledger.crashed(0, max_crashes=2)
    assert dict(ledger.quarantined) == {0: "kills_engine"}
    assert (ledger.crashes(0), ledger.counts()["dropped/engine_lost"]) == (0, 2)
    ledger.check()


def test_attempts_survive_a_restart_so_that_a_poison_prompt_does_not_start_over() -> None:
    ledger = Ledger(total=None)
    dispatch(ledger)
    ledger.failed(0, "engine_error", max_attempts=2)
    ledger = reloaded(ledger)
    dispatch(ledger)
    assert ledger.failed(0, "engine_error", max_attempts=2)


def test_a_restart_counts_what_was_in_flight_as_dropped_and_issues_it_first() -> None:
    ledger = Ledger(total=None)
    queue(ledger, 4)
    ledger.trained([0, 2])
    dispatch(ledger)
    ledger = reloaded(ledger)
    assert ledger.counts()["dropped/restart"] == 3
    assert [dispatch(ledger) for _ in range(4)] == [1, 3, 4, 5]
    ledger.check()


def test_a_dropped_group_does_not_hold_the_resume_position() -> None:
    ledger = Ledger(total=150)
    queue(ledger, 150)
    ledger.dropped(2, "stale")
    ledger.trained([uid for uid in range(150) if uid != 2])
    ledger = reloaded(ledger)
    assert ledger.state()["outstanding"] == [2]
    assert ledger.counts()["dropped/stale"] == 1


def test_the_state_does_not_grow_with_the_run() -> None:
    ledger = Ledger(total=None)
    for _ in range(1000):
        ledger.trained(queue(ledger, 4))
    assert len(json.dumps(ledger.state())) < 200


def test_data_shorter_than_what_was_issued_is_refused_on_resume() -> None:
    ledger = Ledger(total=10)
    queue(ledger, 8)
    with pytest.raises(CheckpointError, match="has issued 8 prompts and the data holds 5"):
        Ledger.restore(ledger.state(), total=5)


@pytest.mark.parametrize("damage", [{"cursor": 7}, {"outstanding": None}, {"trained": "4"}, {"quarantined": {"x": ""}}])
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    ledger = Ledger(total=None)
    queue(ledger, 4)
    with pytest.raises(CheckpointError, match="damaged"):
        Ledger.restore({**ledger.state(), **damage}, total=None)


def step(ledger: Ledger, rng: random.Random, trained: Counter[int]) -> None:
    """One random event that can happen to a run."""
    in_flight = list(ledger._in_flight.items())
    uid, stage = rng.choice(in_flight) if in_flight else (None, None)
    event = rng.random()
    if uid is None or event < 0.4:
        if ledger.next_uid() is not None:
            ledger.dispatched(rng.choice(ledger.upcoming(3)))
    elif event < 0.55:
        ledger.dropped(uid, rng.choice(["stale", "queue_full"]))
    elif stage == "dispatched" and event < 0.6:
        ledger.failed(uid, "timeout", max_attempts=10_000)
    elif stage == "dispatched":
        ledger.queued(uid)
    else:
        ledger.trained([uid])
        trained[uid] += 1


@given(seed=st.integers(0, 2**32), total=st.integers(1, 40), crash=st.floats(0, 0.2))
def test_every_occurrence_is_trained_exactly_once_under_random_drops_failures_and_crashes(
    seed: int, total: int, crash: float
) -> None:
    rng, ledger, trained = random.Random(seed), Ledger(total), Counter[int]()
    committed = (ledger.state(), Counter[int]())
    while ledger.trained_count < total:
        step(ledger, rng, trained)
        ledger.check()
        if rng.random() < 0.3:
            committed = (json.loads(json.dumps(ledger.state())), trained.copy())
        if rng.random() < crash:  # training after the commit is lost with the parameters
            ledger, trained = Ledger.restore(committed[0], total), committed[1].copy()
    assert trained == Counter(range(total))
    assert ledger.counts()["waiting"] == ledger.counts()["queued"] == 0
