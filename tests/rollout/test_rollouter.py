from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections import Counter
from typing import Any

import pytest
from rollout_rig import BROKEN, LengthReward, Rig, run_config

from tidemill.errors import DataError, EngineCrashedError, EngineError, RewardError, RewardTimeoutError, RunError
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import Sampling, WeightUpdate
from tidemill.records import Completion, EngineId, Int32Array, Prompt
from tidemill.rollout.group_request import Timeouts
from tidemill.rollout.rewards import Response

pytestmark = pytest.mark.own_time


async def settle(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def requests(rig: Rig) -> Counter[int]:
    """How often each occurrence was requested."""
    return Counter(int(name.partition(".")[0]) for engine in rig.engines for name, _ in engine.requests)


# ---- the end of a run


class Late(FakeEngine):
    """Holds the first response to occurrence 3 until `arrive` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.arrive = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        completions = await super().generate(request_id, prompt_ids, sampling)
        if request_id == "3.3":
            await self.arrive.wait()
        return completions


async def test_rest_of_the_data_that_becomes_too_old_is_generated_again() -> None:
    engine = Late()
    rig = Rig(run_config(data={"epochs": 1}), rows=11, engines=[engine])
    run = asyncio.create_task(rig.rollouter.run())
    assert await rig.train_step()  # without occurrence 3
    await settle(lambda: len(rig.queue.queued) == 6)
    lease = await rig.queue.lease(4, 1, 5)
    engine.arrive.set()
    await settle(lambda: len(rig.queue.queued) == 3)
    uids = [delivery.header.uid for delivery in lease.deliveries]
    await rig.rollouter.mark_trained(uids)
    await asyncio.sleep(0.05)
    assert not rig.queue.closed  # at the next version occurrence 3 is too old
    rig.version = 2
    await engine.update_weights(WeightUpdate(2, "", 0), "keep")
    await rig.rollouter.begin_version(2)
    swept = await rig.queue.lease(4, 2, 5)
    assert swept.swept == (3,)
    await rig.rollouter.reissue(swept.swept, "stale")
    rest = await rig.queue.lease(4, 2, 5)
    assert ([delivery.header.uid for delivery in rest.deliveries], rest.ended) == ([3, 9, 10], True)
    await run


async def test_seven_prompts_batch_four_five_epochs_ends_after_eight_full_batches() -> None:
    rig = Rig(run_config(data={"epochs": 5}, trainer={"steps": 100}), rows=7)
    assert await rig.run() == 8
    assert rig.uids == sorted(set(rig.uids))
    assert rig.ledger.next_uid() is None
    rest = set(range(35)) - set(rig.uids)
    assert len(rest) == 3
    assert rig.queue.closed


async def test_the_run_generates_no_more_groups_than_its_steps_train() -> None:
    rig = Rig(run_config(trainer={"steps": 3}))
    assert await rig.run() == 3
    assert sorted(requests(rig)) == rig.uids == list(range(12))


async def test_stop_cancels_and_counts_the_groups_in_flight_and_closes_the_queue() -> None:
    rig = Rig(faults={uid: Fault("hang") for uid in range(99)})
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: requests(rig).total() == 8)
    await rig.rollouter.stop()
    await asyncio.wait_for(run, 5)
    assert rig.queue.closed
    assert rig.ledger.counts()["dropped/stopped"] == 8
    assert len(rig.engines[0].aborted) == 8
    rig.ledger.check()


async def test_tokens_of_cancelled_groups_are_waste() -> None:
    config, engine = run_config(rollout={"max_new_tokens": 500}), FakeEngine(lengths=(500, 500))
    rig = Rig(config, engines=[engine], timeouts=Timeouts(answer_s=30.0))
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: requests(rig).total() == 8)
    await rig.rollouter.stop()
    await asyncio.wait_for(run, 5)
    sampled = (await rig.engines[0].stats())["generated_tokens"]
    assert 0 < sampled == (await rig.rollouter.stats())["wasted_tokens"]


async def test_every_prompt_too_long_ends_the_run_instead_of_searching_for_ever() -> None:
    rig = Rig(run_config(data={"max_prompt_tokens": 5}))
    with pytest.raises(
        DataError, match=r"none of the 16 prompts can be used\. .* more than data\.max_prompt_tokens = 5"
    ):
        await asyncio.wait_for(rig.rollouter.run(), 5)


async def test_a_prompt_that_is_too_long_is_skipped_counted_and_never_sent() -> None:
    limit = len("<user>question 9<assistant>")  # rows 10 to 15 have one digit more
    rig = Rig(run_config(data={"max_prompt_tokens": limit, "epochs": 1}, trainer={"steps": 2}))
    assert await rig.run() == 2
    assert sorted(group.prompt.row for group in rig.trained) == sorted(set(range(10)) - rest_of(rig, 10))
    assert set(rig.ledger.quarantined.values()) <= {"too_long"}
    assert not set(requests(rig)) & set(rig.ledger.quarantined)


async def test_a_prompt_that_cannot_be_rendered_is_skipped_and_counted() -> None:
    rig = Rig(run_config(data={"epochs": 1, "shuffle": False}, trainer={"steps": 3}), surrogate_row=3)
    assert await rig.run() == 3
    assert 3 not in {group.prompt.row for group in rig.trained}
    assert rig.ledger.quarantined == {3: "unrenderable"}


def rest_of(rig: Rig, rows: int) -> set[int]:
    """Rows that fit and were not trained when the steps were done."""
    return set(range(rows)) - {group.prompt.row for group in rig.trained}


# ---- staleness


@pytest.mark.parametrize(
    ("max_staleness", "pause_mode"), [(0, None), (0, "wait"), *itertools.product([1, 3], ["keep", "wait", "abort"])]
)
async def test_no_trained_token_is_older_than_the_bound(max_staleness: int, pause_mode: str | None) -> None:
    asynchrony = {"max_staleness": max_staleness, "pause_mode": pause_mode}
    config = run_config(asynchrony=asynchrony, trainer={"steps": 8}, rollout={"max_new_tokens": 12})
    rig = Rig(config, engines=[FakeEngine(lengths=(1, 12)) for _ in range(2)])
    assert await rig.run() == 8
    assert max(rig.ages) <= max_staleness
    assert len(set(rig.uids)) == len(rig.uids) == 32


async def test_bound_zero_is_synchronous_and_reproducible_token_by_token() -> None:
    config = run_config(asynchrony={"max_staleness": 0})
    first, second = Rig(config), Rig(config, token_delay_s=0.001)
    await first.run()
    await second.run()
    assert [group.to_bytes() for group in ordered(first)] == [group.to_bytes() for group in ordered(second)]
    assert all(group.oldest_version == group.newest_version == group.uid // 4 for group in first.trained)


def ordered(rig: Rig) -> list[Any]:
    """The trained groups by uid, without their wall time."""
    from dataclasses import replace

    groups = sorted(rig.trained, key=lambda group: group.uid)
    return [replace(g, rollouts=tuple(replace(r, seconds=0.0) for r in g.rollouts)) for g in groups]


async def test_a_resumed_synchronous_run_equals_an_uninterrupted_one() -> None:
    config = run_config(asynchrony={"max_staleness": 0})
    whole, before = Rig(config), Rig(config)
    await whole.run()
    run = asyncio.create_task(before.rollouter.run())
    await before.train(steps=2)
    state = json.loads(json.dumps(await before.rollouter.ledger_state()))
    run.cancel()
    after = Rig(config, state=state, version=2)
    after.engines[0]._version = 2
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(after.rollouter.run())
        tasks.create_task(after.train(steps=3))
    resumed = [group.to_bytes() for group in [*ordered(before), *ordered(after)]]
    assert resumed == [group.to_bytes() for group in ordered(whole)]


async def test_a_group_in_flight_that_became_too_old_is_cancelled_and_issued_again() -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": 1}), faults={2: Fault("hang", times=1)})
    assert await rig.run() == 5
    assert 2 in rig.uids
    assert requests(rig)[2] == 2
    stats = await rig.rollouter.stats()
    assert stats["cancelled/stale"] == stats["dropped/stale"] == rig.ledger.counts()["dropped/stale"] >= 1
    assert any(name.startswith("2.") for name in rig.engines[0].aborted)


async def test_a_group_that_became_too_old_while_it_was_scored_does_not_reach_the_trainer() -> None:
    class Slow(LengthReward):
        async def score(self, prompt: Prompt, responses: Any) -> Any:
            if prompt.uid == 2 and len(rig.trained) < 8:
                await too_late.wait()
            return await super().score(prompt, responses)

    too_late = asyncio.Event()
    rig = Rig(rewards=Slow())
    run = asyncio.create_task(rig.rollouter.run())
    await rig.train(steps=2)  # the bound is 1
    too_late.set()
    await rig.train(steps=3)
    await run
    assert 2 in rig.uids
    assert (rig.ledger.counts()["dropped/stale"], rig.queue.swept, rig.queue.arrived) == (1, 0, 20)
    assert "cancelled/stale" not in await rig.rollouter.stats()


async def test_an_engine_that_failed_gets_groups_again_after_new_weights() -> None:
    failing, well = FakeEngine(faults={uid: Fault("error", times=1) for uid in range(8)}), FakeEngine()
    rig = Rig(engines=[failing, well])
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: rig.queue.arrived == 8)
    before = len(failing.requests)
    await rig.train(steps=3)
    assert len(failing.requests) > before
    await rig.rollouter.stop()
    await run


async def test_the_bound_of_verl_limits_the_groups_between_two_syncs() -> None:
    config = run_config(asynchrony={"max_staleness": 8, "staleness_threshold": 0.5}, queue={"capacity": 100})
    rig = Rig(config)
    run = asyncio.create_task(rig.rollouter.run())
    await asyncio.sleep(0.1)
    assert requests(rig).total() == 6  # (1 + 0.5) * 4
    await rig.train_step()
    await asyncio.sleep(0.1)
    assert requests(rig).total() == 6 + 4  # the 2 left in the queue count
    run.cancel()


async def test_versions_never_go_backwards() -> None:
    rig = Rig(version=3)
    with pytest.raises(RunError, match="version 2 begins after version 3"):
        await rig.rollouter.begin_version(2)


# ---- failures


async def test_groups_that_never_return_are_replaced_and_the_run_goes_on(caplog: Any) -> None:
    config = run_config(
        trainer={"steps": 1, "ppo_mini_batch_size": 128},
        asynchrony={"max_staleness": 0},
        rollout={"group_timeout_s": 0.3, "concurrent_samples_per_replica": 128},
    )
    rig = Rig(config, faults={uid: Fault("hang", times=1) for uid in (5, 50, 100)})
    with caplog.at_level(logging.WARNING):
        assert await rig.run() == 1
    assert rig.uids == list(range(128))
    assert rig.ledger.counts()["dropped/timeout"] == 3
    assert "prompt occurrence 50: timeout, issued again" in caplog.text


@pytest.mark.parametrize("kind", ["error", "abort", "empty"])
async def test_a_failed_attempt_is_tried_again(kind: Any) -> None:
    rig = Rig(faults={3: Fault(kind, times=2)})
    assert await rig.run() == 5
    assert 3 in rig.uids
    assert requests(rig)[3] == 3
    reason = {"error": "engine_error", "abort": "aborted", "empty": "empty"}[kind]
    assert rig.ledger.counts()[f"dropped/{reason}"] == 2


async def test_a_poison_prompt_is_quarantined_and_stays_so_after_a_restart() -> None:
    rig = Rig(run_config(rollout={"max_attempts": 2}), faults={3: Fault("error")})
    assert await rig.run() == 5
    assert requests(rig)[3] == 2
    assert rig.ledger.quarantined == {3: "engine_error"}
    assert rig.uids == [uid for uid in range(21) if uid != 3]
    again = Rig(state=await rig.rollouter.ledger_state(), version=5, config=run_config(trainer={"steps": 6}))
    again.engines[0]._version = 5
    run = asyncio.create_task(again.rollouter.run())
    await again.train(steps=1)
    await asyncio.wait_for(run, 5)
    assert again.uids == [21, 22, 23, 24]


async def test_a_new_attempt_after_a_failure_has_another_seed_and_one_after_a_drop_the_same() -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": 0}), faults={1: Fault("error", times=1)})
    await rig.run()
    seeds = [sampling.seed for name, sampling in rig.engines[0].requests if name.startswith("1.")]
    assert len(set(seeds)) == 2


async def test_a_reward_that_fails_for_every_prompt_ends_the_run_with_its_traceback() -> None:
    rig = Rig(rewards=LengthReward(always=BROKEN))
    with pytest.raises(RewardError, match=r"8 prompts in a row failed(.|\n)*ZeroDivisionError"):
        await asyncio.wait_for(rig.rollouter.run(), 5)
    assert not rig.queue.closed
    rig.ledger.check()


async def test_a_reward_that_fails_for_every_prompt_of_a_small_set_ends_the_run_too() -> None:
    rig = Rig(run_config(data={"epochs": 1}), rows=3, rewards=LengthReward(always=BROKEN))
    with pytest.raises(RewardError, match="3 prompts in a row"):
        await asyncio.wait_for(rig.rollouter.run(), 5)


@pytest.mark.parametrize(
    ("error", "reason"), [(BROKEN, "reward_error"), (RewardTimeoutError("timed out"), "reward_timeout")]
)
async def test_a_reward_that_fails_for_some_prompts_quarantines_those(error: Exception, reason: str) -> None:
    rig = Rig(rewards=LengthReward(dict.fromkeys(range(1, 12), error)))
    assert await rig.run() == 5
    assert rig.ledger.quarantined == dict.fromkeys(range(1, 12), reason)
    assert (await rig.rollouter.stats())[f"failed/{reason}"] == 33


async def test_a_reward_that_stops_working_ends_the_run_before_it_uses_up_the_prompts() -> None:
    rig = Rig(run_config(trainer={"steps": 999}), rewards=LengthReward(dict.fromkeys(range(9, 9999), BROKEN)))
    with pytest.raises(ExceptionGroup) as caught:
        await rig.run()
    assert caught.group_contains(RewardError, match="32 prompts in a row failed")
    assert len(rig.ledger.quarantined) < 40


async def test_an_unexpected_error_in_a_background_task_ends_the_run() -> None:
    rig = Rig(rewards=LengthReward(always=KeyError("bug")))
    with pytest.raises(KeyError, match="bug"):
        await asyncio.wait_for(rig.rollouter.run(), 5)


async def test_a_failing_engine_does_not_attract_the_groups_of_the_others() -> None:
    alive = FakeEngine(token_delay_s=0.002)
    failing = FakeEngine(faults={uid: Fault("error") for uid in range(99)})
    config = run_config(trainer={"steps": 3}, rollout={"concurrent_samples_per_replica": 16})
    rig = Rig(config, engines=[failing, alive])
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: rig.queue.arrived == 8)
    assert not rig.ledger.quarantined
    assert rig.ledger.counts()["dropped/engine_error"] <= 8
    run.cancel()


async def test_a_prompt_is_not_blamed_for_engines_that_are_lost_with_their_machines() -> None:
    rig = Rig(faults={0: Fault("hang")})
    run = asyncio.create_task(rig.rollouter.run())
    for n in range(5):
        await settle(lambda: any(name.startswith("0.") for name in rig.engines[-1]._running))
        await rig.engines[-1].shutdown()
        await rig.rollouter.remove_engine(f"engine {n}", "engine_lost")
        rig.engines.append(FakeEngine(faults={0: Fault("hang")} if n < 4 else {}))
        await rig.rollouter.add_engine(f"engine {n + 1}", rig.engines[-1])
    await settle(lambda: rig.queue.arrived == 8)
    assert not rig.ledger.quarantined
    assert requests(rig)[0] == 6
    run.cancel()


class Dying(FakeEngine):
    """Dies on request; its requests report that one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.death = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        place = len(self.requests)
        self.requests.append((request_id, sampling))
        await self.death.wait()
        await asyncio.sleep(0.02 * place)
        raise EngineCrashedError("it died")


async def test_all_requests_of_a_crashed_engine_count_also_those_that_report_late() -> None:
    """Although the first report has the engine removed."""
    rig = Rig(engines=[engine := Dying()])
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: len(engine.requests) == 8)
    engine.death.set()
    await settle(lambda: bool(rig.rollouter._engines.lost()))
    await rig.rollouter.remove_engine(EngineId(0), "engine_lost")
    asked = [int(name.partition(".")[0]) for name, _ in engine.requests]
    assert [rig.ledger.crashes(uid) for uid in asked] == [1] * len(asked)
    run.cancel()


async def test_an_engine_that_is_retired_gets_nothing_more_and_its_groups_are_trained() -> None:
    leaving, staying = (FakeEngine(lengths=(low, 8), token_delay_s=0.01) for low in (1, 8))
    config = run_config(asynchrony={"max_staleness": 5}, rollout={"concurrent_samples_per_replica": 4})
    rig = Rig(config, engines=[leaving, staying])
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: bool(leaving.requests))
    retired = asyncio.create_task(rig.rollouter.remove_engine(EngineId(0), "engine_retired", 5.0))
    await asyncio.sleep(0)
    asked = len(leaving.requests)
    assert await rig.train() == 5
    await asyncio.gather(run, retired)
    assert (len(leaving.requests), leaving.aborted) == (asked, [])
    assert "dropped/engine_retired" not in rig.ledger.counts()


async def test_engines_that_all_fail_end_the_run() -> None:
    rig = Rig(faults={uid: Fault("error") for uid in range(99)})
    with pytest.raises(EngineError, match=r"prompts in a row failed.*told to fail"):
        await asyncio.wait_for(rig.rollouter.run(), 5)


async def test_the_watchdog_names_the_oldest_occurrences_when_nothing_finishes() -> None:
    rig = Rig(run_config(rollout={"group_timeout_s": 0.2}), faults={uid: Fault("hang") for uid in range(99)})
    with pytest.raises(RunError, match=r"no group finished for 0.4 s while 8 were running.*\[\d+(, \d+){4}\]"):
        await asyncio.wait_for(rig.rollouter.run(), 5)


# ---- the queue


async def test_a_full_queue_holds_up_groups_and_loses_none() -> None:
    config = run_config(queue={"capacity": 4}, asynchrony={"max_staleness": 5}, rollout={"group_timeout_s": 0.5})
    rig = Rig(config, timeouts=Timeouts(put_s=0.05))
    run = asyncio.create_task(rig.rollouter.run())
    in_flight = rig.rollouter._in_flight
    await settle(lambda: sum(request.stage == "delivering" for request in in_flight.values()) == 16, 60)
    await asyncio.sleep(1.2)  # two group time-outs, many attempts: a wait for room is not a failure
    stats = await rig.rollouter.stats()
    assert (stats["delivering"], stats["generating"], rig.queue.arrived) == (16, 0, 4)
    assert rig.ledger.counts() == {"issued": 20, "queued": 20} | dict.fromkeys(
        ("trained", "quarantined", "dispatched", "waiting"), 0
    )
    assert await rig.train() == 5
    await asyncio.wait_for(run, 5)
    assert rig.uids == list(range(20))


async def test_a_prompt_that_always_outlasts_the_bound_is_quarantined_and_the_others_are_trained() -> None:
    config = run_config(trainer={"steps": 12}, rollout={"max_attempts": 3})
    rig = Rig(config, rows=64, faults={2: Fault("hang")})
    assert await rig.run() == 12
    assert dict(rig.ledger.quarantined) == {2: "never_fits"}
    assert rig.uids == [uid for uid in range(12 * 4 + 1) if uid != 2]
    stats = await rig.rollouter.stats()
    assert stats["skipped/never_fits"] == 1
    assert stats["cancelled/stale"] == rig.ledger.counts()["dropped/stale"] + 1 >= 3
    assert sum(name.startswith("2.") for name, _ in rig.engines[0].requests) == 3


async def test_groups_that_the_queue_drops_for_room_are_issued_again() -> None:
    config = run_config(queue={"capacity": 4, "when_full": "drop_oldest"}, asynchrony={"max_staleness": 2})
    rig = Rig(config)
    assert await rig.run() == 5
    assert len(set(rig.uids)) == 20
    assert rig.ledger.counts()["dropped/queue_full"] > 0


async def test_a_group_swept_from_the_queue_makes_room_before_the_trainer_hears_of_it() -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": 0}))
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: rig.queue.arrived == 4)
    await rig.engines[0].update_weights(WeightUpdate(1, "", 0), "keep")
    await rig.rollouter.begin_version(1)  # the four are too old now, and none of the 8 for versions 0 and 1 trained
    await settle(lambda: rig.ledger.counts()["issued"] == 4 + 8)
    run.cancel()


# ---- crash and resume


@pytest.mark.parametrize("seed", range(5))
async def test_runs_killed_at_random_points_train_every_prompt_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    config = run_config(data={"epochs": 1}, trainer={"steps": 25}, rollout={"max_new_tokens": 6, "max_attempts": 99})
    committed: tuple[Any, int, list[int]] = (None, 0, [])
    for life in range(50):
        state, version, trained = committed
        engine = FakeEngine(seed=life, lengths=(1, 6), faults={uid: Fault("error", 1) for uid in range(0, 100, 7)})
        engine._version = version
        rig = Rig(config, rows=100, state=state, version=version, engines=[engine])
        run = asyncio.create_task(rig.rollouter.run())
        for _ in range(rng.randint(0, 6)):
            if version == 25:
                break
            await rig.train_step()
            version += 1
            if rng.random() < 0.5 or version == 25:
                committed = (json.loads(json.dumps(await rig.rollouter.ledger_state())), version, trained + rig.uids)
            await asyncio.sleep(rng.random() * 0.003)
        run.cancel()
        if committed[1] == 25:
            break
    assert Counter(committed[2]) == Counter(range(100))


# ---- numbers


async def test_stats_count_since_the_last_call_and_the_ledger_over_the_run() -> None:
    rig = Rig()
    await rig.run()
    stats = await rig.rollouter.stats()
    assert stats["generated_groups"] == 20
    assert stats["generated_tokens"] == 20 * 2 * 4
    assert stats["reward/mean"] == stats["reward/length"] == stats["response_length/mean"] == 4
    assert stats["ledger/trained"] == 20
    again = await rig.rollouter.stats()
    assert (again["generated_groups"], again["ledger/trained"]) == (0, 20)
    assert "reward/mean" not in again


async def test_groups_go_to_the_least_loaded_engine() -> None:
    rig = Rig(engines=[FakeEngine(token_delay_s=0.001) for _ in range(4)])
    run = asyncio.create_task(rig.rollouter.run())
    await settle(lambda: requests(rig).total() == 8)
    assert [len(engine.requests) for engine in rig.engines] == [2, 2, 2, 2]
    run.cancel()


async def test_rewards_see_the_decoded_response_and_the_row() -> None:
    seen: list[tuple[Prompt, list[Response]]] = []

    class Spy(LengthReward):
        async def score(self, prompt: Prompt, responses: Any) -> Any:
            seen.append((prompt, list(responses)))
            return await super().score(prompt, responses)

    rig = Rig(rewards=Spy())
    await rig.run()
    prompt, responses = seen[0]
    assert prompt.answer == str(prompt.row)
    group = next(group for group in rig.trained if group.uid == prompt.uid)
    assert [rollout.text for rollout in group.rollouts] == responses
    assert [len(rollout.token_ids) for rollout in group.rollouts] == [response.tokens for response in responses]
