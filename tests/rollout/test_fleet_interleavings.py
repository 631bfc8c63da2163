"""Engines that die, hang, come up or do not, join and retire, while others are scored and versions are published."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from fleet_rig import FakeMember, FleetRig
from rollout_rig import held_out

from tidemill.errors import EngineError, EngineLostError, SyncError
from tidemill.observe.meters import Timings
from tidemill.protocols import Evaluation, Loads, PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, Float32Array, Group, Int32Array
from tidemill.rollout.elasticity import VERSIONS, Elasticity
from tidemill.task_group import task_group
from tidemill.train.batch import MicroBatch
from tidemill.train.evaluation import Mode, Validation
from tidemill.train.stop import Stop
from tidemill.train.trainer import Metrics, Position, Trainer

pytestmark = pytest.mark.own_time
DEADLINE_S = 200.0
STEPS = 25
WAITING = {"time/step": 1.0, "time/sync": 0.1, "idle/trainer": 0.5, "idle/rollouter": 0.0}
AHEAD = {"time/step": 1.0, "time/sync": 0.1, "idle/trainer": 0.0, "idle/rollouter": 0.9}


class Unsteady(FakeMember):
    """Everything takes a drawn time, and some of it fails."""

    draw: random.Random

    async def pause(self, *seconds: float) -> None:
        await asyncio.sleep(self.draw.choice(seconds))

    async def start(self) -> None:
        await self.pause(0, 0.01, 0.1)
        if self.draw.random() < 0.1:
            raise EngineError("it did not come up")

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        if request_id.startswith("evaluation"):
            await self.pause(0, 0.01, 0.05)
        if self._dead:
            raise EngineLostError(f"{self.id} is dead")
        return await super().generate(request_id, prompt_ids, sampling)

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        await self.pause(*[0, 0.001, 0.02] * 16, 60)  # the last of them is too long
        await super().update_weights(update, mode)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        await self.pause(0, 0.001)
        return await super().score(token_ids)


@dataclass
class UnsteadyRun:
    """A run whose engines are killed at random."""

    rig: FleetRig
    mode: Mode
    draw: random.Random
    scored: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fleet, rollouter = self.rig.fleet, self.rig.rollout.rollouter
        self.validation = Validation(self.mode, rollouter, fleet, self.note, lambda notice: None)

    def note(self, step: int, evaluation: Evaluation) -> None:
        self.scored.append((step, evaluation.version))

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(self.draw.choice([0.003, 0.02, 0.05]))
            for member in self.rig.fleet.members:
                match self.draw.randrange(20):
                    case 0:
                        member.hangs.set()  # type: ignore[attr-defined]
                    case 1 | 2:
                        await member.shutdown()

    async def step(self, version: int) -> None:
        for _ in range(VERSIONS):
            self.rig.fleet.measured(self.draw.choice([WAITING, AHEAD]))
        if version % 3 == 1:
            await self.validation.begin(version, version)
        assert await self.rig.rollout.train_step()
        if self.validation.holds_sync:
            await self.validation.settle()
        await self.rig.fleet.publish(version + 1, self.draw.choice(["keep", "abort"]))

    async def run(self) -> None:
        async with asyncio.timeout(DEADLINE_S), self.rig.fleet.kept():
            await self.rig.fleet.publish(0, "keep")
            generation, killer = asyncio.create_task(self.rig.rollout.rollouter.run()), asyncio.create_task(self.kill())
            self.rig.rollout.engines.clear()  # the fleet publishes
            for version in range(STEPS):
                await self.step(version)
            killer.cancel()
            await self.validation.settle()
            await self.rig.rollout.rollouter.stop()
            await generation


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["pace", "drop", "wait", "mask"])
@pytest.mark.parametrize("mode", ["blocking", "concurrent", "spare"])
async def test_whatever_becomes_of_engines_no_group_is_lost_or_too_old_and_none_of_them_stays(
    tmp_path: Path, mode: Mode, strategy: str, seed: int
) -> None:
    draw = random.Random(f"{mode} {strategy} {seed}")
    options = {"trainer": {"steps": STEPS}, "asynchrony": {"staleness_strategy": strategy, "max_staleness": 2}}
    made = type("Drawn", (Unsteady,), {"draw": draw})
    rig = FleetRig(
        tmp_path, start=made, options=options, held_out=held_out(8), elasticity=Elasticity(1, 4), losses=1000
    )
    for member in rig.members:
        member.__class__ = made
    troubled = UnsteadyRun(rig, mode, draw)
    await troubled.run()
    rig.rollout.ledger.check()
    assert len(rig.rollout.uids) == len(set(rig.rollout.uids)) == STEPS * 4
    assert max(rig.rollout.ages) <= 2
    assert troubled.scored == [(step, step) for step, _ in troubled.scored]
    assert all(member.ended for member in [*rig.members, *rig.started] if member not in rig.fleet.members)


ROWS = 60
End = Literal["steps", "data", "stop", "immediate"]
Part = Literal["generation", "update", "export", "score", "adoption", "commit"]


class Reader(Unsteady):
    """Reads the weights of a version, and computes from them."""

    weights = b""
    training: UnsteadyTraining

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        await super().update_weights(update, mode)
        self.training.fail("adoption")
        self.weights = Path(update.path).read_bytes()

    async def score(self, token_ids: Int32Array) -> Float32Array:
        await super().score(token_ids)
        return scores(self.weights, token_ids)


def scores(weights: bytes, token_ids: Int32Array) -> Float32Array:
    """Others for every other weights."""
    return np.full(len(token_ids) - 1, -float(weights), dtype=np.float32)


@dataclass(repr=False)
class UnsteadyTraining:
    """A whole run whose engines are killed at random while the trainer learns on; its ranks and its observer.

    The weights are the number of the optimizer steps that made them.

    Attributes:
        failing: what fails after a few optimizer steps, if anything does.
        done: optimizer steps.
        exporting: whether the weights must not change.
        taken: groups of each step.
        commits: position and ledger after each version.
    """

    folder: Path
    options: dict[str, Any]
    draw: random.Random
    end: End
    commits: list[tuple[Position, Mapping[str, Any]]] = field(default_factory=list)
    start: tuple[Position, Mapping[str, Any]] | None = None
    failing: Part | None = None

    def __post_init__(self) -> None:
        self.made = type("Drawn", (Reader,), {"draw": self.draw, "training": self})
        position, state = self.start or (Position(), None)
        self.exporting = False
        self.taken, self.ages, self.scored = dict[int, list[int]](), list[int](), list[tuple[int, int]]()
        self.versions, self.metrics = dict[int, int](), list[Metrics]()
        self.stop = Stop()
        self.rig = FleetRig(
            self.folder,
            start=self.made,
            options=self.options,
            held_out=held_out(4),
            elasticity=Elasticity(1, 4),
            losses=1000,
            export=self.export,
            score=self.score,
            rows=ROWS,
            state=state,
            version=position.version,
        )
        for member in self.rig.members:
            member.__class__ = self.made
        rollout = self.rig.rollout
        self.done = position.step * rollout.config.asynchrony.require_batches
        self.trainer = Trainer(
            rollout.config,
            rollout.queue,
            rollout.rollouter,
            self,
            self.rig.fleet,
            self,
            self.commit,
            replace(position),
            self.stop,
        )

    @property
    def trained(self) -> list[int]:
        return [uid for uids in self.taken.values() for uid in uids]

    async def pause(self, *seconds: float) -> None:
        await asyncio.sleep(self.draw.choice(seconds))

    def fail(self, part: Part) -> None:
        if part == self.failing and self.done >= 3:
            raise SyncError("broken on purpose")

    async def generate(self) -> None:
        """Beside the rollouter, to fail as it may."""
        while self.failing == "generation":
            await self.pause(0.01)
            self.fail("generation")

    async def export(self, path: Path) -> int:
        self.exporting = True
        self.fail("export")
        path.write_bytes(b"")
        await self.pause(0, 0.001, 0.02)
        return path.write_bytes(b"%06d" % self.done)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        await self.pause(0, 0.001)
        self.fail("score")
        self.exporting = False
        return scores(b"%06d" % self.done, token_ids)

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        assert not self.exporting
        await self.pause(0, 0.001, 0.01, 0.05)
        self.fail("update")
        self.done += 1
        [lease] = self.rig.rollout.queue.leases.values()
        groups = [Group.from_bytes(arrival.delivery.payload) for arrival in lease]
        self.taken[self.trainer.position.step] = [group.uid for group in groups]
        mask = self.rig.rollout.config.asynchrony.staleness_strategy == "mask"  # what is older is left out
        self.ages += [version - (group.newest_version if mask else group.oldest_version) for group in groups]
        return {"loss": 1.0}

    async def commit(self, position: Position) -> None:
        await self.pause(0, 0.01)
        self.fail("commit")
        self.commits.append((position, await self.rig.rollout.rollouter.ledger_state()))

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        self.metrics.append(metrics)
        self.versions[position.step] = position.version
        self.rig.fleet.measured(metrics | {"idle/trainer": 0.0, "idle/rollouter": 0.0} | self.load)

    @property
    def load(self) -> Metrics:
        """Of several versions in a row."""
        loads = ({"idle/trainer": 0.5}, {"idle/rollouter": 0.9})
        return loads[self.trainer.position.step // 8 % 2]

    def synced(self, step: int, metrics: Metrics) -> None:
        self.metrics.append(metrics)

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        """Nothing here draws a timeline."""

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.scored.append((step, evaluation.version))

    def notice(self, text: str) -> None:
        """Nobody reads it here."""

    async def kill(self) -> None:
        await asyncio.sleep(0.02)
        while True:
            await self.pause(0.003, 0.02, 0.05, 0.2)
            for member in self.rig.fleet.members:
                match self.draw.randrange(20):
                    case 0:
                        member.hangs.set()  # type: ignore[attr-defined]
                    case 1 | 2:
                        await member.shutdown()

    async def end_early(self) -> None:
        if self.end in ("stop", "immediate"):
            await asyncio.sleep(self.draw.uniform(0.0, 1.0))
            self.stop.ask("enough", immediate=self.end == "immediate" and self.draw.random() < 0.5)
        if self.end == "immediate":
            await self.pause(0, 0.01, 0.2)
            self.stop.ask("the pod ends", immediate=True)

    async def run(self) -> None:
        """As `run.Run` does."""
        rollouter = self.rig.rollout.rollouter
        async with asyncio.timeout(DEADLINE_S), self.rig.fleet.kept():
            await self.rig.fleet.publish(self.trainer.position.version, "keep")
            others = asyncio.create_task(self.kill()), asyncio.create_task(self.end_early())
            try:
                async with task_group() as tasks:
                    tasks.create_task(rollouter.run())
                    tasks.create_task(self.generate())
                    await self.trainer.fit()
                    await rollouter.stop()
            finally:
                for other in others:
                    other.cancel()
        await self.commit(self.trainer.position)
        self.rig.rollout.ledger.check()


def drawn_options(draw: random.Random, end: End, mode: Mode) -> dict[str, Any]:
    bound, trigger = draw.choice([0, 1, 1, 2, 3]), draw.choice([1, 1, 2, 3])
    asynchrony: dict[str, Any] = {"max_staleness": bound, "trigger_parameter_sync_step": trigger}
    if bound:
        strategy = draw.choice(["pace", "drop", "wait", "mask"])
        modes = ("keep", "abort") if strategy == "mask" else ("keep", "abort", "wait")
        asynchrony |= {"staleness_strategy": strategy, "pause_mode": draw.choice(modes)}
        asynchrony["partial_rollout"] = asynchrony["pause_mode"] != "wait"
        asynchrony["staleness_threshold"] = draw.choice([None, 0.5])
    asynchrony["require_batches"] = draw.choice([1, 1, 2])
    return {
        "data": {"held_out": "y.jsonl", "epochs": 1},
        "rollout": {"engines": 2},
        "queue": {"when_full": draw.choice(["block", "block", "drop_oldest"])},
        "trainer": {"steps": 100 if end == "data" else 14 // asynchrony["require_batches"]},
        "asynchrony": asynchrony,
        "evaluation": {"every": draw.choice([1, 2, 3]), "mode": mode},
        "checkpoint": {"every": 1},
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("end", ["steps", "data", "stop", "immediate"])
@pytest.mark.parametrize("mode", ["blocking", "concurrent", "spare"])
async def test_whatever_becomes_of_engines_while_the_trainer_learns_on_a_run_ends_whole_and_can_go_on(
    tmp_path: Path, mode: Mode, end: End, seed: int
) -> None:
    draw = random.Random(f"{mode} {end} {seed}")
    training = UnsteadyTraining(tmp_path / "first", drawn_options(draw, end, mode), draw, end)
    await training.run()
    check(training)
    start = position, _ = draw.choice(training.commits)
    rest = UnsteadyTraining(tmp_path / "rest", training.options, draw, "steps", start=start)
    await rest.run()
    check(rest)
    uids = training.trained[: position.groups] + rest.trained
    assert len(uids) == len(set(uids))
    if end == "data":
        assert len(uids) + len(rest.rig.rollout.ledger.state()["quarantined"]) == ROWS
    else:
        assert rest.trainer.position.step == rest.rig.rollout.config.trainer.steps


def check(training: UnsteadyTraining) -> None:
    """What holds at the end of a run."""
    config, position, fleet = training.rig.rollout.config, training.trainer.position, training.rig.fleet
    assert max(training.ages, default=0) <= config.asynchrony.max_staleness
    assert len(training.trained) == position.groups - (training.start[0].groups if training.start else 0)
    assert list(training.versions) == sorted(training.versions)
    assert all(training.versions.get(step, version) == version for step, version in training.scored)
    assert all(ledger["trained"] == committed.groups for committed, ledger in training.commits)
    if not training.stop.immediate:
        assert position.unsynced == 0
        assert training.rig.rollout.rollouter._admission.version == position.version
        assert not training.trained or any("time/sync_adopt" in metrics for metrics in training.metrics)
        for member in fleet.members:
            assert member._dead or member.weights == b"%06d" % training.done  # type: ignore[attr-defined]
    assert all(member.ended for member in [*training.rig.members, *training.rig.started] if member not in fleet.members)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("part", ["generation", "update", "export", "score", "adoption", "commit"])
@pytest.mark.parametrize("mode", ["blocking", "concurrent", "spare"])
async def test_whatever_fails_while_the_trainer_learns_on_ends_the_run_with_that_and_leaves_nothing_under_way(
    tmp_path: Path, mode: Mode, part: Part, seed: int
) -> None:
    draw = random.Random(f"{mode} {part} {seed}")
    training = UnsteadyTraining(tmp_path, drawn_options(draw, "steps", mode), draw, "steps", failing=part)
    before = asyncio.all_tasks()
    with pytest.raises(SyncError, match="broken on purpose"):
        await training.run()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
