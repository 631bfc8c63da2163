"""Engines that die, hang, come up or do not, join and retire, while others are scored and versions are published."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fleet_rig import Crew, FakeMember
from rollout_rig import held_out

from tidemill.errors import EngineError, EngineLostError
from tidemill.protocols import Evaluation, PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, Float32Array, Int32Array
from tidemill.rollout import fleet as fleet_module
from tidemill.rollout.elasticity import VERSIONS, Elasticity
from tidemill.train.validation import Mode, Validation

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
            raise EngineLostError(f"{self.name} is dead")
        return await super().generate(request_id, prompt_ids, sampling)

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        await self.pause(*[0, 0.001, 0.02] * 16, 60)  # the last of them is too long
        await super().update_weights(update, mode)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        await self.pause(0, 0.001)
        return await super().score(token_ids)


@dataclass
class Troubled:
    """A run whose engines are killed at random."""

    crew: Crew
    mode: Mode
    draw: random.Random
    scored: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fleet, rollouter = self.crew.fleet, self.crew.rig.rollouter
        self.validation = Validation(self.mode, rollouter, fleet, self.note, lambda notice: None)

    def note(self, step: int, evaluation: Evaluation) -> None:
        self.scored.append((step, evaluation.version))

    async def kill(self) -> None:
        while True:
            await asyncio.sleep(self.draw.choice([0.003, 0.02, 0.05]))
            for member in self.crew.fleet.members:
                match self.draw.randrange(20):
                    case 0:
                        member.hangs.set()  # type: ignore[attr-defined]
                    case 1 | 2:
                        await member.shutdown()

    async def step(self, version: int) -> None:
        for _ in range(VERSIONS):
            self.crew.fleet.measured(self.draw.choice([WAITING, AHEAD]))
        if version % 3 == 1:
            await self.validation.begin(version, version)
        assert await self.crew.rig.train_step()
        if self.validation.holds_sync:
            await self.validation.settle()
        await self.crew.fleet.publish(version + 1, self.draw.choice(["keep", "abort"]))

    async def run(self) -> None:
        async with asyncio.timeout(DEADLINE_S), self.crew.fleet.kept():
            await self.crew.fleet.publish(0, "keep")
            generation, killer = asyncio.create_task(self.crew.rig.rollouter.run()), asyncio.create_task(self.kill())
            self.crew.rig.engines.clear()  # the fleet publishes
            for version in range(STEPS):
                await self.step(version)
            killer.cancel()
            await self.validation.settle()
            await self.crew.rig.rollouter.stop()
            await generation


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["pace", "drop", "wait"])
@pytest.mark.parametrize("mode", ["blocking", "concurrent", "spare"])
async def test_whatever_becomes_of_engines_no_group_is_lost_or_too_old_and_none_of_them_stays(
    tmp_path: Path, mode: Mode, strategy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PROBE_S", 0.005), ("PROBE_TIMEOUT_S", 0.1), ("RETRY_S", 0.005), ("LOSSES", 1000)):
        monkeypatch.setattr(fleet_module, name, value)
    draw = random.Random(f"{mode} {strategy} {seed}")
    options = {"trainer": {"steps": STEPS}, "asynchrony": {"staleness_strategy": strategy, "max_staleness": 2}}
    made = type("Drawn", (Unsteady,), {"draw": draw})
    crew = Crew(tmp_path, start=made, options=options, held_out=held_out(8), elasticity=Elasticity(1, 4))
    for member in crew.members:
        member.__class__ = made
    troubled = Troubled(crew, mode, draw)
    await troubled.run()
    crew.rig.ledger.check()
    assert len(crew.rig.uids) == len(set(crew.rig.uids)) == STEPS * 4
    assert max(crew.rig.ages) <= 2
    assert troubled.scored == [(step, step) for step, _ in troubled.scored]
    assert all(member.ended for member in [*crew.members, *crew.started] if member not in crew.fleet.members)
