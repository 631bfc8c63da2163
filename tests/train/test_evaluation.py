"""Held-out scores during training."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet_rig import DEADLINE_S, FleetRig, until
from rollout_rig import CharTokenizer

from tidemill.config.data import DataConfig
from tidemill.observe.meters import Timings
from tidemill.protocols import Evaluation, Loads
from tidemill.records import EngineId
from tidemill.rollout.prompts import PromptSet
from tidemill.train.batch import MicroBatch
from tidemill.train.trainer import Metrics, Position, Trainer

pytestmark = pytest.mark.own_time

ROWS = [{"prompt": f"{n}?", "answer": str(n)} for n in range(6)]
STEPS = 8


@dataclass
class School:
    """A run whose held-out prompts are answered when the test says so.

    Attributes:
        scores: step, version and the steps that were done when the score came.
        hooks: by the number of steps that were done, awaited before the next one learns.
    """

    folder: Path
    mode: str
    engines: int = 2
    every: int = 3
    trigger: int = 1
    hooks: dict[int, Any] = field(default_factory=dict)
    scores: list[tuple[int, int, int]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = {
            "data": {"held_out": "x.jsonl"},
            "rollout": {"engines": self.engines},
            "asynchrony": {"trigger_parameter_sync_step": self.trigger},
            "evaluation": {"every": self.every, "mode": self.mode},
            "trainer": {"steps": STEPS},
        }
        held_out = PromptSet(ROWS, CharTokenizer(), DataConfig(train="x.jsonl"), seed=0)
        self.rig = FleetRig(self.folder, engines=self.engines, options=options, held_out=held_out)
        rollout = self.rig.rollout
        self.trainer = Trainer(rollout.config, rollout.queue, rollout.rollouter, self, self.rig.fleet, self)

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        if (hook := self.hooks.get(self.trainer.position.step)) is not None:
            await hook()
        return {"loss": 1.0}

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        self.metrics.append(metrics)

    def synced(self, step: int, metrics: Metrics) -> None:
        """Versions tell enough here."""

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        pass

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        assert len(evaluation.answers) == len(ROWS)
        self.scores.append((step, evaluation.version, self.trainer.position.step))

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def answers(self, given: bool) -> None:
        for member in self.rig.members:
            member.answers.set() if given else member.answers.clear()

    async def run(self, steps: int = STEPS) -> None:
        async with asyncio.timeout(DEADLINE_S), self.rig.fleet.kept():
            await self.rig.fleet.publish(0, "keep")
            generation = asyncio.create_task(self.rig.rollout.rollouter.run())
            await self.trainer.fit()
            await self.rig.rollout.rollouter.stop()
            await generation
        self.rig.rollout.ledger.check()
        assert self.rig.rollout.ledger.trained_count == steps * 4
        assert max(metrics["staleness/max"] for metrics in self.metrics) <= 1


async def test_a_blocking_evaluation_blocks_the_trainer(tmp_path: Path) -> None:
    school = School(tmp_path, "blocking")
    await school.run()
    assert school.scores == [(3, 3, 3), (6, 6, 6)]


async def test_training_continues_during_a_concurrent_evaluation_and_the_next_sync_waits_for_it(tmp_path: Path) -> None:
    school = School(tmp_path, "concurrent", every=1, trigger=4)

    async def release() -> None:
        assert school.scores == []
        school.answers(True)

    async def withhold() -> None:
        school.answers(False)

    school.hooks = {3: withhold, 7: release}
    await school.run()
    # The score of version 1 came when seven steps were done, and before version 2 was published.
    assert [(step, version) for step, version, _ in school.scores] == [(4, 1)]
    assert school.scores[0][2] >= 7
    assert [member.adopted for member in school.rig.members] == [[0, 1, 2], [0, 1, 2]]


async def test_a_weight_sync_does_not_overtake_a_concurrent_evaluation(tmp_path: Path) -> None:
    school = School(tmp_path, "concurrent")
    school.answers(False)

    async def later() -> None:
        await until(lambda: school.trainer.position.step == 4)
        await asyncio.sleep(0.05)
        assert [member.adopted[-1] for member in school.rig.members] == [3, 3]
        assert (school.scores, school.trainer.position.step) == ([], 4)
        school.answers(True)

    looking = asyncio.create_task(later())
    await school.run()
    await looking
    assert [(step, version) for step, version, _ in school.scores] == [(3, 3), (6, 6)]
    assert school.metrics[3]["time/evaluate"] > 0


async def test_the_last_sync_of_a_stopped_run_does_not_overtake_a_concurrent_evaluation(tmp_path: Path) -> None:
    school = School(tmp_path, "concurrent", every=1, trigger=4)
    school.answers(False)

    async def stop() -> None:
        school.trainer.stop.ask("enough")

    async def later() -> None:
        await until(lambda: school.trainer.position.step == 5)
        await asyncio.sleep(0.05)
        assert [member.adopted[-1] for member in school.rig.members] == [1, 1]
        school.answers(True)

    school.hooks = {4: stop}
    looking = asyncio.create_task(later())
    await school.run(steps=5)
    await looking
    assert school.scores == [(4, 1, 5)]
    assert [member.adopted for member in school.rig.members] == [[0, 1, 2], [0, 1, 2]]


async def test_a_stopped_run_waits_for_the_running_evaluation(tmp_path: Path) -> None:
    school = School(tmp_path, "blocking")

    async def stop() -> None:
        school.trainer.stop.ask("enough")

    school.hooks = {2: stop}
    await school.run(steps=3)
    assert school.scores == [(3, 3, 3)]


@pytest.mark.parametrize(("mode", "trigger", "asked"), [("blocking", 1, 3), ("concurrent", 1, 3), ("concurrent", 4, 4)])
async def test_an_immediate_stop_waits_for_no_score(tmp_path: Path, mode: str, trigger: int, asked: int) -> None:
    school = School(tmp_path, mode, every=1 if trigger > 1 else 3, trigger=trigger)
    school.answers(False)  # for ever: the engines may be gone already

    async def later() -> None:
        await until(lambda: school.trainer.position.step >= asked)
        await asyncio.sleep(0.05)
        school.trainer.stop.ask("the pod ends", immediate=True)

    looking = asyncio.create_task(later())
    async with asyncio.timeout(DEADLINE_S), school.rig.fleet.kept():
        await school.rig.fleet.publish(0, "keep")
        generation = asyncio.create_task(school.rig.rollout.rollouter.run())
        await school.trainer.fit()
        await school.rig.rollout.rollouter.stop()
        await generation
    await looking
    assert (school.scores, school.trainer.validation._task) == ([], None)
    assert school.trainer.position.version == (3 if trigger == 1 else 1)


async def test_syncs_skip_a_spare_engine_and_it_catches_up(tmp_path: Path) -> None:
    school = School(tmp_path, "spare", every=2)
    school.answers(False)
    other, spare = school.rig.members

    async def look() -> None:
        assert (other.adopted[-1], spare.adopted[-1], school.scores) == (3, 2, [])
        school.answers(True)
        await until(lambda: bool(school.scores) and spare.adopted[-1] == 3)

    school.hooks = {3: look}
    await school.run()
    assert [(step, version) for step, version, _ in school.scores] == [(2, 2), (4, 4), (6, 6)]
    evaluated = [name for name, _ in spare.requests if name.startswith("evaluation")]
    assert len(evaluated) == 3 * len(ROWS)
    assert not any(name.startswith("evaluation") for name, _ in other.requests)
    assert any("." in name and not name.startswith("evaluation") for name, _ in spare.requests)
    assert school.rig.rollout.rollouter._engines._open()[-1].id == EngineId(1)


@pytest.mark.parametrize("mode", ["concurrent", "spare"])
async def test_the_end_of_the_run_waits_for_the_score(tmp_path: Path, mode: str) -> None:
    school = School(tmp_path, mode, every=7)
    school.answers(False)

    async def later() -> None:
        await until(lambda: school.trainer.position.step == STEPS)
        await asyncio.sleep(0.02)
        school.answers(True)

    opening = asyncio.create_task(later())
    await school.run()
    await opening
    assert school.scores == [(7, 7, STEPS)]


@pytest.mark.parametrize("mode", ["blocking", "concurrent", "spare"])
@pytest.mark.parametrize("every", [1, STEPS - 1, STEPS])
@pytest.mark.parametrize("slow", ["generation", "training", "neither"])
async def test_a_run_ends_whichever_side_is_slower_and_whenever_it_is_scored(
    tmp_path: Path, mode: str, every: int, slow: str
) -> None:
    school = School(tmp_path, mode, every=every)
    for member in school.rig.members:
        member._delay = 0.01 if slow == "generation" else 0.0

    async def linger() -> None:
        await asyncio.sleep(0.03)

    school.hooks = dict.fromkeys(range(STEPS), linger) if slow == "training" else {}
    await school.run()
    # The last version is the exported model, which is scored after the training.
    assert [step for step, _, _ in school.scores] == list(range(every, STEPS, every))
    assert all(step == version for step, version, _ in school.scores)
    assert school.trainer.validation._task is None


async def test_a_spare_engine_that_dies_costs_its_score_and_nothing_else(tmp_path: Path) -> None:
    school = School(tmp_path, "spare", every=7)
    school.answers(False)

    async def die() -> None:
        await school.rig.members[1].shutdown()
        school.answers(True)

    school.hooks = {7: die}
    await school.run()
    assert school.scores == []
    assert [notice for notice in school.notices if "version 7 has no held-out score" in notice]


async def test_with_a_single_engine_a_sync_waits_for_the_score(tmp_path: Path) -> None:
    school = School(tmp_path, "spare", every=3)

    async def die() -> None:
        school.rig.fleet._start = lambda number: None  # type: ignore[assignment,return-value]
        school.rig.fleet._forget(EngineId(1), school.rig.members[1])
        await school.rig.rollout.rollouter.remove_engine(EngineId(1), "engine_lost")

    school.hooks = {1: die}
    await school.run()
    assert [(step, version) for step, version, _ in school.scores] == [(3, 3), (6, 6)]
    assert not any(name.startswith("evaluation") for name, _ in school.rig.members[1].requests)


@pytest.mark.parametrize("mode", ["concurrent", "spare"])
async def test_a_trainer_that_fails_leaves_no_evaluation_behind(tmp_path: Path, mode: str) -> None:
    school = School(tmp_path, mode)
    school.answers(False)

    async def fail() -> None:
        raise RuntimeError("learning failed")

    school.hooks = {3: fail}
    with pytest.raises(RuntimeError, match="learning failed"):
        await school.run()
    assert school.trainer.validation._task is None
