"""Which prompts are deferred to the next version, and in which order finished groups are delivered."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_rig import Rig, run_config

from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling
from tidemill.records import Completion, Int32Array, Prompt
from tidemill.rollout.group_request import GroupRequest
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.ordering import DeliveryOrder, StartOrder
from tidemill.rollout.staleness import StalenessPolicy

pytestmark = pytest.mark.own_time

ROWS = 10


def start_order(eta: int = 1, trigger: int = 4, lasted: float = 40.0, **seconds: float) -> StartOrder:
    """Knows the durations of rows, `r3=30.0`. A version that `lasted` ended at time 0, long after all its groups."""
    asynchrony = {"max_staleness": eta, "trigger_parameter_sync_step": trigger}
    made = StartOrder(lambda uid: uid % ROWS, ROWS, run_config(asynchrony=asynchrony))
    for row, took in seconds.items():
        made.finished(int(row[1:]), -1000.0 - took, -1000.0)
    made.begin_version(-lasted)
    made.begin_version(0.0)
    return made


def test_a_prompt_of_unknown_length_starts_in_order() -> None:
    assert start_order(r3=60.0).choose([11, 13], now=39.0) == 11


def test_a_long_prompt_starts_early_in_a_version_and_is_deferred_late_in_one() -> None:
    # 2 versions of 40 s, less a step of 10 s: 70 s from the start of the version
    assert start_order(r3=60.0).choose([13, 14], now=9.0) == 13
    late = start_order(r3=60.0)
    assert late.choose([13, 14], now=11.0) == 14
    late.start(14, [13])
    assert len(late) == 1
    late.begin_version(40.0)
    assert late.choose([13, 15], now=79.0) == 13  # it is due, however late
    late.start(13, [])
    assert len(late) == 0


def test_a_prompt_that_is_due_stays_so_until_it_starts() -> None:
    late = start_order(r3=60.0)
    late.start(14, [13])
    late.begin_version(40.0)
    assert [late.choose([13, 15], now=79.0) for _ in range(3)] == [13] * 3
    assert len(late) == 1


def test_a_prompt_gets_twice_the_time_that_it_took_but_never_more_than_the_longest() -> None:
    assert start_order(r3=20.0, r4=60.0).choose([13, 15], now=31.0) == 15  # 40 s of 39
    assert start_order(r3=20.0, r4=60.0).choose([13, 15], now=29.0) == 13
    assert start_order(r3=20.0, r4=30.0).choose([13, 15], now=39.0) == 13


def test_where_the_trainer_waits_for_groups_its_last_batch_is_taken_when_the_last_of_them_is_finished() -> None:
    made = start_order(r3=60.0)
    made.finished(5, 30.0, 37.0)
    made.finished(6, 30.0, 35.0)
    made.trained([5, 6])
    made.begin_version(40.0)  # 2 versions of 40 s, less 3 s
    assert made.choose([13, 14], now=40.0 + 16.0) == 13
    assert made.choose([13, 14], now=40.0 + 18.0) == 14


def test_the_first_starts_where_none_ends_in_time() -> None:
    made = start_order(r3=60.0, r4=60.0)
    assert made.choose([13, 14], now=39.0) == 13
    made.start(13, [])
    assert len(made) == 0
    assert made.choose([], now=39.0) is None


@given(seconds=st.floats(0, 1e6), now=st.floats(0, 1e6))
def test_with_a_bound_of_zero_the_order_is_that_of_the_data(seconds: float, now: float) -> None:
    assert start_order(eta=0, r3=seconds).choose([13, 14], now) == 13


@given(eta=st.integers(1, 4), trigger=st.integers(2, 8), share=st.floats(0, 1), length=st.floats(0, 1))
def test_generations_that_fit_wherever_they_start_are_never_deferred(
    eta: int, trigger: int, share: float, length: float
) -> None:
    longest = 40.0 * (eta - 1 / trigger) * (1 - 1e-6)
    made = start_order(eta, trigger, r3=longest * length, r4=longest)
    assert made.choose([13, 14, 15], now=40.0 * share) == 13


def test_before_a_version_was_measured_nothing_is_deferred() -> None:
    made = StartOrder(lambda uid: uid, ROWS, run_config())
    made.finished(3, -1000.0, 0.0)
    assert made.choose([3, 4], now=500.0) == 3
    made.begin_version(500.0)
    assert made.choose([3, 4], now=900.0) == 3


@given(seed=st.integers(0, 2**32), lookahead=st.integers(1, 12))
def test_no_prompt_is_deferred_in_two_versions_and_each_starts_once(seed: int, lookahead: int) -> None:
    rng, made, ledger = random.Random(seed), start_order(), Ledger(60)
    now, version = 0.0, 0
    passed, started = defaultdict[int, set[int]](set), list[int]()
    while (uids := ledger.upcoming(lookahead)) and (uid := made.choose(uids, now)) is not None:
        for other in uids[: uids.index(uid)]:
            passed[other].add(version)
        made.start(uid, uids[: uids.index(uid)])
        ledger.dispatched(uid)
        started.append(uid)
        made.finished(uid, now - rng.choice([1.0, 30.0, 80.0]), now)
        now += rng.choice([0.0, 3.0])
        if rng.random() < 0.1:
            made.begin_version(now)
            version += 1
    assert all(len(versions) == 1 for versions in passed.values())
    assert sorted(started) == list(range(60))
    assert len(made) == 0


class Timed(FakeEngine):
    """Answers at once, and advances the clock by the duration of the row."""

    now = 0.0

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        completions = await super().generate(request_id, prompt_ids, sampling)
        self.now += 30.0 if int(request_id.partition(".")[0]) % 8 == 6 else 1.0
        return completions


@pytest.mark.parametrize("bound", [{"max_staleness": 0}, {"max_staleness": 1, "staleness_threshold": 0}])
async def test_a_synchronous_run_trains_in_the_order_of_the_data_however_long_a_prompt_takes(bound: Any) -> None:
    engine = Timed()
    config = run_config(asynchrony=bound, data={"shuffle": False}, rollout={"group_timeout_s": 1e4})
    rig = Rig(config, rows=8, engines=[engine], clock=lambda: engine.now)
    await rig.run()
    assert [group.uid // 4 for group in rig.trained] == [group.oldest_version for group in rig.trained]


async def test_prompts_that_took_long_start_early_in_the_next_version_and_every_prompt_is_trained_once() -> None:
    engine = Timed()
    config = run_config(
        data={"shuffle": False},
        rollout={"concurrent_samples_per_replica": 1, "group_timeout_s": 1e4},
        trainer={"steps": 12},
    )
    rig = Rig(config, rows=8, engines=[engine], clock=lambda: engine.now)
    await rig.run()
    order = [int(name.partition(".")[0]) for name, _ in engine.requests]
    assert order[:8] == list(range(8))  # nothing is known yet
    assert order != sorted(order)
    assert sorted(order) == rig.uids == list(range(48))


# ---- delivery

WAIT = StalenessPolicy(1, 4, 100, strategy="wait")  # a group that started at version 0 must be among the first 8


def started(*versions: int) -> dict[int, GroupRequest]:
    """Requests in flight that started at these versions."""
    prompts = [Prompt(n, n, np.zeros(1, np.int32), "", None, {}) for n in range(len(versions))]
    return {n: GroupRequest(prompts[n], n, version, 0.0) for n, version in enumerate(versions)}


class Waiting:
    """A finished group that waits for its delivery, which lasts until `done`."""

    def __init__(self, order: DeliveryOrder, request: GroupRequest) -> None:
        self.order, self.request, self.released, self.done = order, request, False, asyncio.Event()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        async with self.order.delivery(self.request):
            self.released = True
            await self.done.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begin(order: DeliveryOrder, requests: Sequence[GroupRequest]) -> list[Waiting]:
    """Groups that all wait."""
    deliveries = [Waiting(order, request) for request in requests]
    await settle()
    return deliveries


async def end(*deliveries: Waiting) -> None:
    for delivery in deliveries:
        delivery.task.cancel()
    await asyncio.gather(*(delivery.task for delivery in deliveries), return_exceptions=True)


async def test_two_groups_that_may_be_delivered_but_not_both_are_delivered_one_by_one() -> None:
    order, in_flight = DeliveryOrder(WAIT), started(0, 0, 0, 1, 1)
    first, second = await begin(order, [in_flight[3], in_flight[4]])
    order.release_next(4, in_flight)
    await settle()
    assert (first.released, second.released) == (True, False)
    first.done.set()
    await settle()
    del in_flight[3]
    order.release_next(5, in_flight)  # the three of version 0 need the places 5, 6 and 7 now
    await settle()
    assert not second.released
    del in_flight[0]  # one of them failed
    order.release_next(5, in_flight)
    await settle()
    assert second.released
    await end(first, second)


async def test_a_group_is_delivered_at_the_last_moment_in_time() -> None:
    order, in_flight = DeliveryOrder(WAIT), started(0)
    [only] = await begin(order, [in_flight[0]])
    order.release_next(7, in_flight)
    await settle()
    assert only.released
    await end(only)


async def test_a_cancelled_wait_neither_takes_nor_ends_the_delivery_of_another_group() -> None:
    order, in_flight = DeliveryOrder(WAIT), started(0, 0, 0, 0)
    first, second, third, fourth = await begin(order, list(in_flight.values()))
    order.release_next(0, in_flight)
    await settle()
    await end(second)
    del in_flight[1]
    order.release_next(0, in_flight)
    await settle()
    assert [delivery.released for delivery in (first, third, fourth)] == [True, False, False]
    first.done.set()
    await settle()
    del in_flight[0]
    order.release_next(1, in_flight)
    await settle()
    assert [third.released, fourth.released] == [True, False]
    await end(first, third, fourth)


async def test_at_the_end_of_a_run_no_group_waits() -> None:
    order, in_flight = DeliveryOrder(WAIT), started(0, 0)
    waiting = await begin(order, [in_flight[0]])
    order.release_all()
    waiting += await begin(order, [in_flight[1]])
    assert [delivery.released for delivery in waiting] == [True, True]
    await end(*waiting)
