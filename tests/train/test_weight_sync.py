"""The trainer continues while the engines adopt an exported version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_rig import Loop
from own_time import OwnTime
from rollout_rig import Rig, run_config

from tidemill.errors import SyncError
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import WeightUpdate
from tidemill.train.trainer import Position

pytestmark = pytest.mark.own_time


class Gate:
    """Holds up adoptions until it is opened."""

    def __init__(self) -> None:
        self.asked, self.opened = list[int](), asyncio.Event()

    async def __call__(self, version: int) -> None:
        self.asked.append(version)
        await self.opened.wait()


async def test_the_next_step_runs_during_an_adoption_and_the_next_export_waits_for_it() -> None:
    loop = Loop(Rig(run_config(trainer={"steps": 6})), adopting=(gate := Gate()))
    seen: list[tuple[int, list[int], int]] = []

    async def look() -> None:
        seen.append((loop.position.version, list(gate.asked), loop.rig.rollouter._admission.version))
        if len(seen) == 2:  # the trainer is at version 1, the engines are not
            asyncio.get_running_loop().call_later(0.5, gate.opened.set)

    loop.before_step = look
    await loop.fit()
    assert seen[:2] == [(0, [], 0), (1, [1], 0)]
    assert seen[2][:2] == (2, [1, 2])
    assert loop.position.version == loop.rig.rollouter._admission.version == 6
    assert max(loop.ages) == 1
    assert ["time/sync_adopt" in metrics for metrics in loop.metrics] == [False, *[True] * 5]
    assert sum(phases.count("adopt") for phases in loop.phases) == 6  # also of one that takes longer than its step


async def test_on_policy_the_trainer_waits_for_groups_of_the_version_it_has_exported() -> None:
    loop = Loop(Rig(run_config(asynchrony={"max_staleness": 0})))

    async def slowly(version: int) -> None:
        await asyncio.sleep(1.0)

    loop.adopting = slowly
    await loop.fit()
    assert [moment.version for moment in loop.steps] == [0, 1, 2, 3, 4]
    assert set(loop.ages) == {0}


@pytest.mark.parametrize("seconds", [0.999, 3.0])
async def test_the_deadline_of_a_batch_excludes_an_adoption_that_generation_waits_for(seconds: float) -> None:
    asynchrony = {"max_staleness": 0}
    config = run_config(asynchrony=asynchrony, trainer={"steps": 3, "get_timeout_s": 1.0})
    loop = Loop(Rig(config, token_delay_s=0.1))

    async def slowly(version: int) -> None:
        await asyncio.sleep(seconds)

    loop.adopting = slowly
    await loop.fit()
    assert loop.position.step == 3


async def test_the_deadline_of_a_batch_is_not_extended_after_an_adoption() -> None:
    config = run_config(asynchrony={"max_staleness": 0}, trainer={"steps": 3, "get_timeout_s": 1.0})
    loop = Loop(Rig(config, faults={uid: Fault("hang") for uid in range(4, 8)}))
    with pytest.raises(ExceptionGroup) as failure:
        await loop.fit()
    [error] = failure.value.exceptions
    assert str(error).startswith("no batch of 4 groups within trainer.get_timeout_s = 1.0 s")
    assert 1.0 < asyncio.get_running_loop().time() < 2.0


async def test_an_adoption_that_fails_ends_the_run_at_once() -> None:
    """Not when the batch that cannot come any more is missed."""
    config = run_config(trainer={"steps": 9, "get_timeout_s": 1000.0})
    loop = Loop(Rig(config))

    async def refuse(version: int) -> None:
        if version == 2:
            await asyncio.sleep(0.5)
            raise SyncError("engine 0 computes something else")

    loop.adopting = refuse
    with pytest.raises(ExceptionGroup) as failure:
        await loop.fit()
    assert [str(error) for error in failure.value.exceptions] == ["engine 0 computes something else"]
    assert loop.position.version == 2
    assert asyncio.get_running_loop().time() < 60


@pytest.mark.parametrize("immediate", [False, True])
async def test_a_stop_waits_for_a_running_adoption_unless_it_is_immediate(immediate: bool) -> None:
    loop = Loop(Rig(run_config()), adopting=(gate := Gate()))

    async def stop() -> None:
        if loop.position.version == 1:
            loop.trainer.stop.ask("enough", immediate=immediate)
            if not immediate:
                asyncio.get_running_loop().call_later(0.5, gate.opened.set)

    loop.before_step = stop
    await loop.fit()
    assert gate.asked == ([1] if immediate else [1, 2])
    assert loop.position == Position(
        2, 1 if immediate else 2, 8, loop.position.response_tokens, 1, loop.position.seconds, 1 if immediate else 0
    )
    assert loop.rig.rollouter._admission.version == (0 if immediate else 2)


async def test_an_immediate_stop_while_an_export_waits_ends_the_wait() -> None:
    loop = Loop(Rig(run_config()), adopting=(gate := Gate()))

    async def soon() -> None:
        if loop.position.version == 1:  # the second export will wait for the first adoption
            asyncio.get_running_loop().call_later(0.5, lambda: loop.trainer.stop.ask("the pod ends", immediate=True))

    loop.before_step = soon
    await loop.fit()
    assert (gate.asked, loop.position.version, loop.position.unsynced) == ([1], 1, 1)


async def test_the_metrics_of_the_last_sync_belong_to_its_step() -> None:
    loop = Loop(Rig(run_config(asynchrony={"trigger_parameter_sync_step": 2})))

    async def slowly(version: int) -> None:
        await asyncio.sleep(0.5)

    loop.adopting = slowly
    await loop.fit()
    assert ["time/sync" in metrics for metrics in loop.metrics] == [False, True, False, True, True]
    assert loop.metrics[-1]["time/sync_adopt"] == 2.0  # the one before ended in that step, too
    assert sum(metrics.get("time/sync_adopt", 0.0) for metrics in loop.metrics) == len(loop.syncs) == 3


async def test_a_run_resumes_from_a_commit_that_precedes_the_adoption_of_its_version() -> None:
    config = run_config(trainer={"steps": 8}, checkpoint={"every": 1})
    gate, committed = Gate(), list[tuple[Position, Mapping[str, Any], int]]()
    loop = Loop(Rig(config), adopting=gate)

    async def commit(position: Position) -> None:
        committed.append((position, await loop.rig.rollouter.ledger_state(), loop.rig.rollouter._admission.version))
        gate.opened.set()

    loop.trainer.commit = commit
    await loop.fit()
    position, ledger, engines = committed[0]
    assert (position.step, position.version, engines) == (1, 1, 0)
    rest = Loop(Rig(config, state=ledger, version=1), position=position)
    await rest.rig.engines[0].update_weights(WeightUpdate(1, "", 0), "keep")
    await rest.fit()
    first = [group.uid for group in loop.steps[0].groups]
    assert sorted(first + [group.uid for group in rest.trained]) == list(range(32))
    assert max(rest.ages) <= 1


@settings(max_examples=60, deadline=None)
@given(
    delays=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5),
    bound=st.integers(0, 3),
    trigger=st.integers(1, 3),
    strategy=st.sampled_from(["pace", "drop", "wait"]),
    partial=st.booleans(),
    seed=st.integers(0, 5),
)
def test_with_slow_adoptions_nothing_is_stale_lost_or_trained_twice(
    delays: list[float], bound: int, trigger: int, strategy: str, partial: bool, seed: int
) -> None:
    asynchrony: dict[str, Any] = {"max_staleness": bound, "trigger_parameter_sync_step": trigger}
    if bound:
        asynchrony |= {"staleness_strategy": strategy, "partial_rollout": partial}
    config = run_config(asynchrony=asynchrony, trainer={"steps": 10})

    async def slowly(version: int) -> None:
        await asyncio.sleep(delays[version % len(delays)])

    async def learn() -> None:
        await asyncio.sleep(0.4)

    async def run() -> Loop:
        engines = [FakeEngine(seed=seed, token_delay_s=0.1, lengths=(1, 8)) for _ in range(2)]
        loop = Loop(Rig(config, engines=engines), adopting=slowly, before_step=learn)
        await loop.fit()
        return loop

    with asyncio.Runner(loop_factory=OwnTime) as runner:
        loop = runner.run(run())
    assert max(loop.ages) <= bound
    assert Counter(group.uid for group in loop.trained) == Counter(range(40))
    if strategy == "wait" and bound:
        assert not [name for name in loop.rig.ledger.counts() if name.startswith("dropped/")]
