"""The four modes are configuration only; each has the property that defines it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from loop_rig import Loop
from rollout_rig import LengthReward, Rig, run_config

from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import PauseMode, WeightUpdate
from tidemill.records import Prompt

pytestmark = pytest.mark.own_time


def straggler(*uids: int) -> FakeEngine:
    """An engine on which these occurrences stay at their first token until the next weight update."""
    return FakeEngine(lengths=(6, 6), faults={uid: Fault("straggle") for uid in uids})


async def test_on_policy_trains_every_group_at_the_version_that_sampled_it_without_overlap() -> None:
    loop = Loop(Rig(run_config(asynchrony={"max_staleness": 0})))
    await loop.fit()
    assert [moment.running for moment in [*loop.steps, *loop.syncs]] == [0] * 10
    assert [{g.oldest_version, g.newest_version} for g in loop.trained] == [{n // 4} for n in range(20)]


class Streamed(FakeEngine):
    """Finishes the second half of a version's eight groups only when the first half has been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = asyncio.Event()

    async def generate(self, request_id: str, *arguments: Any) -> Any:
        completions = await super().generate(request_id, *arguments)
        if int(request_id.partition(".")[0]) % 8 >= 4:
            await self.stepped.wait()
        return completions

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        self.stepped.clear()
        await super().update_weights(update, mode)


@pytest.mark.parametrize("bound", [{"max_staleness": 0}, {"max_staleness": 1, "staleness_threshold": 0}])
async def test_streaming_trains_the_first_groups_of_a_version_while_its_others_are_generated(bound: Any) -> None:
    config = run_config(asynchrony=bound | {"trigger_parameter_sync_step": 2}, trainer={"steps": 6})
    engine = Streamed()
    loop = Loop(Rig(config, engines=[engine]))

    async def let_the_second_half_go() -> None:
        engine.stepped.set()

    loop.before_step = let_the_second_half_go
    await loop.fit()  # a trainer that waited for all groups of a version would never begin
    assert [moment.version for moment in loop.steps] == [0, 0, 1, 1, 2, 2]
    assert set(loop.ages) == {0}
    assert [moment.running for moment in loop.syncs] == [0, 0, 0]


async def test_asynchronous_trains_stale_samples_each_of_one_version() -> None:
    asynchrony = {"max_staleness": 1, "staleness_threshold": 0.5, "partial_rollout": False}
    loop = Loop(Rig(run_config(asynchrony=asynchrony), engines=[straggler(4, 5)]))
    await loop.fit()
    first = loop.syncs[0]
    assert (first.running, first.mode) == (2, "wait")  # they were running, and the sync waits for them
    assert all(group.oldest_version == group.newest_version for group in loop.trained)
    stragglers = [group for group in loop.trained if group.uid in (4, 5)]
    assert [group.newest_version for group in stragglers] == [0, 0]
    assert (min(loop.ages), max(loop.ages)) == (0, 1)
    assert max(metrics["staleness/partial_ratio"] for metrics in loop.metrics) == 0


class Slow(LengthReward):
    """Scores occurrences 4 and 5 when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        if prompt.uid in (4, 5):
            await self.released.wait()
        return await super().score(prompt, responses)


@pytest.mark.parametrize("pause_mode", ["keep", "abort", "wait"])
async def test_a_weight_sync_waits_for_no_reward(pause_mode: str) -> None:
    rewards = Slow()
    loop = Loop(Rig(run_config(asynchrony={"max_staleness": 3, "pause_mode": pause_mode}), rewards=rewards))

    async def release_after_two_syncs() -> None:
        if loop.position.version == 2:
            rewards.released.set()
            while not {4, 5} <= loop.rig.rollouter._admission.queued.keys():
                await asyncio.sleep(0)

    loop.before_step = release_after_two_syncs
    await loop.fit()
    late = [(moment.version, g.oldest_version) for moment in loop.steps for g in moment.groups if g.uid in (4, 5)]
    assert late == [(3, 0), (3, 0)]


@pytest.mark.parametrize("pause_mode", ["keep", "abort"])
async def test_partial_rollouts_continue_with_the_new_version_and_the_tokens_so_far(pause_mode: str) -> None:
    asynchrony = {"staleness_threshold": 0.5, "partial_rollout": True, "pause_mode": pause_mode}
    config = run_config(asynchrony=asynchrony, rollout={"max_new_tokens": 6})
    loop = Loop(Rig(config, engines=[straggler(4, 5)]))
    await loop.fit()
    assert (loop.syncs[0].running, loop.syncs[0].mode) == (2, pause_mode)
    partial = [group for group in loop.trained if group.uid in (4, 5)]
    assert [[(s.version, s.start, s.end) for s in r.versions] for g in partial for r in g.rollouts] == [
        [(0, 0, 1), (1, 1, 6)]
    ] * 4
    assert all(len(r.token_ids) == len(r.log_probs) == 6 for g in partial for r in g.rollouts)
    assert max(loop.ages) == 1  # by the oldest token
    assert max(metrics["staleness/partial_ratio"] for metrics in loop.metrics) == 0.5
