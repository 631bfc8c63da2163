"""The arithmetic of the staleness policy, and whole runs under each strategy."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_rig import Rig, run_config

from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import Delivery
from tidemill.records import EngineId, Int32Array
from tidemill.rollout.group_request import TIMEOUTS, Timeouts
from tidemill.rollout.staleness import StalenessPolicy, too_old

pytestmark = pytest.mark.own_time

STRATEGIES = ["pace", "drop", "wait", "mask"]


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_is_usable_as_long_as_its_oldest_token_or_under_mask_its_newest(strategy: Any) -> None:
    policy = StalenessPolicy(1, 4, 100, strategy=strategy)
    assert policy.usable_version(oldest=3, newest=5) == (5 if strategy == "mask" else 3)


def test_drop_admits_as_many_groups_as_engines_hold_whatever_their_age_will_be() -> None:
    drop = StalenessPolicy(1, 4, 100, total=1000, strategy="drop")
    assert drop.capacity(version=0, running=0, accepted=0) == 100  # pace: (1 + 0 + 1) * 4 = 8
    assert drop.capacity(version=0, running=100, accepted=8) == 0


def test_wait_lets_a_group_overtake_only_while_the_others_keep_their_places() -> None:
    # B = 4, eta = 1: a group that started at version 0 must be among the first 8, at version 1 among the first 12
    wait = StalenessPolicy(1, 4, 100, strategy="wait")
    assert wait.keeps_all_in_time(5, [0, 0, 0])  # the others get places 5, 6, 7 (from 0)
    assert not wait.keeps_all_in_time(6, [0, 0, 0])  # 8 is too late
    assert wait.keeps_all_in_time(6, [0, 0, 1, 1, 1, 1])
    assert wait.keeps_all_in_time(6, [1, 0, 1, 0, 1, 1])  # their order is that of their ages
    assert not wait.keeps_all_in_time(8, [0])


@settings(deadline=None)
@given(st.data(), st.integers(0, 3), st.integers(1, 4), st.integers(1, 12))
def test_under_wait_no_interleaving_makes_a_group_too_old(
    data: st.DataObject, eta: int, per_version: int, concurrent: int
) -> None:
    """Any group may finish at any time; every delivery that the policy allows is trained in time."""
    policy = StalenessPolicy(eta, per_version, concurrent, strategy="wait")
    in_flight: list[int] = []  # version at the start
    finished: set[int] = set()  # indices into the starts
    starts: list[int] = []
    delivered: list[int] = []
    for _ in range(60):
        version = len(delivered) // per_version
        for _ in range(policy.capacity(version, len(in_flight), len(delivered))):
            in_flight.append(len(starts))
            starts.append(version)
        running = [group for group in in_flight if group not in finished]
        if running:
            finished.add(data.draw(st.sampled_from(running), label="finishes"))
        free = [
            group
            for group in in_flight
            if group in finished
            and policy.keeps_all_in_time(len(delivered) + 1, [starts[other] for other in in_flight if other != group])
        ]
        oldest = min(in_flight, key=lambda group: starts[group])
        assert oldest not in finished or oldest in free or any(starts[group] == starts[oldest] for group in free)
        if free:
            group = data.draw(st.sampled_from(free), label="goes")
            assert len(delivered) // per_version - starts[group] <= eta
            in_flight.remove(group)
            delivered.append(group)


# ---- whole runs


def heavy_tail(prompt_ids: Int32Array, version: int, sample: int) -> list[int]:
    """Every fourth row takes thirty times as long as the others."""
    row = int("".join(chr(token) for token in prompt_ids if chr(token).isdigit()))
    return [1] * (60 if row % 4 == 3 else 2)


def heavy_rig(strategy: str, bound: int = 1, steps: int = 12, timeouts: Timeouts = TIMEOUTS, **more: Any) -> Rig:
    config = run_config(
        asynchrony={"max_staleness": bound, "staleness_strategy": strategy}, trainer={"steps": steps}, **more
    )
    return Rig(config, engines=[FakeEngine(script=heavy_tail) for _ in range(2)], timeouts=timeouts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bound", [1, 2])
async def test_every_strategy_keeps_the_bound_and_trains_every_prompt_once(strategy: str, bound: int) -> None:
    rig = heavy_rig(strategy, bound)
    assert await rig.run() == 12
    assert max(rig.ages) <= bound
    assert len(set(rig.uids)) == len(rig.uids) == 48


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_token_that_was_sampled_is_trained_or_counted_as_waste(strategy: str) -> None:
    rig = heavy_rig(strategy, timeouts=Timeouts(answer_s=30.0))
    await rig.run()
    sampled = sum([(await engine.stats())["generated_tokens"] for engine in rig.engines])
    wasted = (await rig.rollouter.stats()).get("wasted_tokens", 0)
    assert sampled == sum(group.response_tokens for group in rig.trained) + wasted
    assert (wasted == 0) == (strategy in ("wait", "mask"))
    masked = sum(group.response_tokens - group.trained_tokens for group in rig.trained)
    assert (masked > 0) == (strategy == "mask")


async def test_wait_drops_nothing_where_pace_drops_what_was_overtaken() -> None:
    pace, wait = heavy_rig("pace"), heavy_rig("wait")
    await pace.run()
    await wait.run()
    assert pace.ledger.counts()["dropped/stale"] > 0
    assert not [name for name in wait.ledger.counts() if name.startswith("dropped/")]
    assert sum(len(engine.requests) for engine in wait.engines) == 48


async def test_mask_trains_no_token_that_is_too_old_and_drops_no_group_with_a_younger_one() -> None:
    rig = heavy_rig("mask")
    await rig.run()
    assert not [name for name in rig.ledger.counts() if name.startswith("dropped/")]
    assert sum(len(engine.requests) for engine in rig.engines) == 48  # each once
    long = [group for group in rig.trained if group.newest_version - group.oldest_version > 1]
    assert long
    assert all(0 < group.trained_tokens < group.response_tokens for group in long)


async def test_mask_drops_a_group_whose_tokens_are_all_too_old() -> None:
    """All queued groups were sampled at version 0, and are leased at version 2."""
    rig = heavy_rig("mask")
    run = asyncio.create_task(rig.rollouter.run())
    async with asyncio.timeout(5):
        while len(rig.queue.queued) < 2:
            await asyncio.sleep(0.005)
    lease = await rig.queue.lease(1, 2, 5)
    assert len(lease.swept) >= 2
    assert not lease.deliveries
    await rig.rollouter.stop()
    await run


@pytest.mark.parametrize(("strategy", "usable"), [("pace", 0), ("mask", 1)])
async def test_a_group_waits_for_room_in_the_queue_until_it_is_too_old(strategy: str, usable: int) -> None:
    """Occurrence 0 has a token of version 0 and three of version 1, and finds no room before version 2."""
    asynchrony = {"max_staleness": 1, "staleness_strategy": strategy}
    engine = FakeEngine(faults={0: Fault("straggle", times=1)})
    rig = Rig(run_config(asynchrony=asynchrony, trainer={"steps": 8}), engines=[engine])
    put, room = rig.queue.put, asyncio.Event()

    async def crowded(deliveries: Sequence[Delivery[bytes]], timeout_s: float) -> list[int]:
        if deliveries[0].header.uid == 0 and not room.is_set():
            await asyncio.sleep(0.001)
            raise TimeoutError
        return await put(deliveries, timeout_s)

    rig.queue.put = crowded  # type: ignore[method-assign]
    run = asyncio.create_task(rig.rollouter.run())
    await rig.train_step()
    async with asyncio.timeout(5):
        while 0 not in rig.rollouter._admission.queued:
            await asyncio.sleep(0.001)
    assert rig.rollouter._admission.queued[0] == usable
    await rig.train_step()
    await asyncio.sleep(0.01)
    assert rig.ledger.counts().get("dropped/stale", 0) == 1 - usable
    room.set()
    await asyncio.sleep(0.01)
    await rig.train(6)
    await run
    [late] = [group for group in rig.trained if group.uid == 0]
    assert late.trained_tokens == (6 if strategy == "mask" else 8)  # of two responses


async def stuck_rig() -> tuple[Rig, FakeEngine, asyncio.Task[None]]:
    """A run under mask whose second engine never finishes a request."""
    stuck = FakeEngine(faults={uid: Fault("hang") for uid in range(99)})
    asynchrony = {"max_staleness": 1, "staleness_strategy": "mask"}
    config = run_config(asynchrony=asynchrony, rollout={"group_timeout_s": 900.0, "max_attempts": 1})
    rig = Rig(config, engines=[FakeEngine(), stuck])
    run = asyncio.create_task(rig.rollouter.run())
    async with asyncio.timeout(5):
        while not stuck.requests:
            await asyncio.sleep(0.005)
    return rig, stuck, run


@pytest.mark.parametrize("fate", ["stays", "cordoned", "retired"])
async def test_mask_cancels_groups_of_an_engine_without_newer_versions_once_they_are_too_old(fate: str) -> None:
    rig, stuck, run = await stuck_rig()
    held, dropped = len(stuck.requests), []
    leaving = asyncio.create_task(asyncio.sleep(0))
    if fate != "stays":
        rig.engines.remove(stuck)  # it gets no new versions
    if fate == "cordoned":
        await rig.rollouter.cordon_engine(EngineId(1))
    if fate == "retired":
        leaving = asyncio.create_task(rig.rollouter.remove_engine(EngineId(1), "engine_retired", 800.0))
        await asyncio.sleep(0.01)
    for _ in range(2):
        await rig.train_step()
        dropped.append(rig.ledger.counts().get("dropped/stale", 0))
    assert dropped == [0, 0 if fate == "stays" else held]
    async with asyncio.timeout(5):
        await leaving
    assert (rig.rollouter._engines.kept_version(EngineId(1)) is not None) == (fate == "cordoned")
    await rig.rollouter.stop()
    await run


async def test_mask_cancels_nothing_of_an_engine_that_was_taken_back() -> None:
    rig, _, run = await stuck_rig()
    await rig.rollouter.cordon_engine(EngineId(1))
    await rig.train_step()
    await rig.rollouter.uncordon_engine(EngineId(1))
    await rig.train_step()
    assert "dropped/stale" not in rig.ledger.counts()
    await rig.rollouter.stop()
    await run


async def test_wait_delivers_out_of_order_as_long_as_all_groups_stay_in_time() -> None:
    rig = heavy_rig("wait", 2)
    await rig.run()
    order = [group.uid for group in rig.trained]
    assert order != sorted(order)  # the order is not simply that of the starts


async def test_wait_goes_on_when_a_group_that_others_wait_for_fails() -> None:
    config = run_config(asynchrony={"staleness_strategy": "wait"}, rollout={"group_timeout_s": 0.2})
    rig = Rig(config, engines=[FakeEngine(faults={0: Fault("hang", times=1), 6: Fault("error", times=1)})])
    assert await rig.run() == 5
    assert rig.uids == list(range(20))


async def test_a_run_that_is_stopped_does_not_wait_for_undelivered_groups() -> None:
    config = run_config(asynchrony={"staleness_strategy": "wait"})
    rig = Rig(config, engines=[FakeEngine(faults={0: Fault("hang")})])
    run = asyncio.create_task(rig.rollouter.run())
    await rig.train_step()
    async with asyncio.timeout(5):  # occurrence 0 needs place 8, the last one in time: no other group may go
        while len(rig.queue.queued) < 3 or (await rig.rollouter.stats())["delivering"] < 4:
            await asyncio.sleep(0.005)
    await rig.rollouter.stop()
    await run
    counts = rig.ledger.counts()
    assert (counts["dropped/stopped"], counts["dispatched"], counts["queued"]) == (5, 0, 3)


async def test_drop_runs_ahead_of_the_pace_and_replaces_exactly_what_it_dropped() -> None:
    rig = heavy_rig("drop", queue={"capacity": 8}, rollout={"concurrent_samples_per_replica": 8})
    assert await rig.run() == 12
    counts = rig.ledger.counts()
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    assert dropped > 0
    requested = Counter(int(name.partition(".")[0]) for engine in rig.engines for name, _ in engine.requests)
    assert sorted(requested) == rig.uids == list(range(48))  # dropped ones again, and no others
    assert counts["issued"] == 48 + dropped >= requested.total()  # some are dropped on their way to the engine
