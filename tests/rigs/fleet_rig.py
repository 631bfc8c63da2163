"""A fleet of fakes, with a rollouter, a synchronizer, and a trainer that only counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rollout_rig import Rig, run_config
from sync_rig import FakeWeights, uniform, write

from tidemill.config.asynchrony import SyncConfig
from tidemill.errors import EngineCrashedError, EngineLostError
from tidemill.fakes import FakeEngine
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, EngineId, Float32Array, Int32Array
from tidemill.rollout.elasticity import Elasticity
from tidemill.rollout.failures import LOSSES
from tidemill.rollout.fleet import Fleet, FleetLimits
from tidemill.rollout.group_request import Timeouts
from tidemill.rollout.prompts import PromptSet
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import SharedMemoryTransport

CANARY = np.arange(6, dtype=np.int32)
DEADLINE_S = 10.0
TIMEOUTS = Timeouts(answer_s=DEADLINE_S)  # so that the requests of a dead engine report even on a busy machine


class FakeMember(FakeEngine):
    """A member without a process.

    Args:
        fails: what `start` raises.
        pending: it finds no place before this.

    Attributes:
        answers: held-out prompts are not answered while this is not set.
    """

    def __init__(
        self, engine_id: EngineId, fails: Exception | None = None, pending: asyncio.Event | None = None
    ) -> None:
        super().__init__(token_delay_s=0.001)
        self.id, self.fails, self.pending = engine_id, fails, pending
        self.hangs = asyncio.Event()
        self.ended = False
        self.adopted: list[int] = []
        self.modes: list[PauseMode] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        completions = await super().generate(request_id, prompt_ids, sampling)
        if request_id.startswith("evaluation"):
            await self.answers.wait()
            self._check_alive()
        return completions

    async def start(self) -> None:
        if self.pending is not None:
            await self.pending.wait()
        if self.fails is not None:
            raise self.fails

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        await super().update_weights(update, mode)
        self.adopted.append(update.version)
        self.modes.append(mode)

    async def version(self) -> int:
        if self.hangs.is_set():
            await asyncio.sleep(60)
        return await super().version()

    async def end(self) -> None:
        await self.shutdown()
        self.kill()

    def kill(self) -> None:
        self.ended = True


class CrashingMember(FakeMember):
    """Crashes during some occurrences and held-out prompts, after their first token."""

    deadly: Collection[int | str] = ()

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineCrashedError(f"{self.id} died")

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        if self._dead:
            raise EngineLostError(f"{self.id} is dead")
        name = request_id.partition(".")[0]
        if (int(name) if name.isdecimal() else name) in self.deadly:
            await asyncio.sleep(0.002)
            await super().shutdown()
            raise EngineCrashedError(f"{self.id} died of {request_id}")
        return await super().generate(request_id, prompt_ids, sampling)


@dataclass
class FleetRig:
    """A rollouter, a trainer that only counts, and a fleet of fakes.

    Attributes:
        export, score: of the trainer's weights.
        state, version: of the ledger and the engines, where a run goes on.
    """

    folder: Path
    engines: int = 2
    start: Callable[[EngineId], FakeMember] = FakeMember
    options: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 5.0
    losses: int = LOSSES
    held_out: PromptSet | None = None
    elasticity: Elasticity | None = None
    export: Callable[[Path], Awaitable[int]] = write
    score: Callable[[Int32Array], Awaitable[Float32Array]] = uniform
    rows: int = 200
    state: Mapping[str, Any] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        self.members = [FakeMember(EngineId(number)) for number in range(self.engines)]
        self.started: list[FakeMember] = []
        self.notices: list[str] = []
        self.rollout = Rig(
            run_config(**self.options),
            rows=self.rows,
            engines=list(self.members),
            held_out=self.held_out,
            state=self.state,
            version=self.version,
            timeouts=TIMEOUTS,
        )
        source = FakeWeights(self.export, self.score)
        transport = SharedMemoryTransport(self.folder / "shm", source)
        self.synchronizer = Synchronizer(SyncConfig(timeout_s=0.5), transport, source, CANARY)
        self.fleet = Fleet(
            self.members,
            self.begin,
            FleetLimits(self.start_timeout_s, 1.0, 0.005, 0.1, 0.005, self.losses),
            self.rollout.rollouter,
            self.synchronizer,
            self.notices.append,
            self.elasticity,
        )

    def begin(self, engine_id: EngineId) -> FakeMember:
        self.started.append(self.start(engine_id))
        return self.started[-1]

    async def train(self, steps: int, at: Callable[[int], Any] = lambda step: None) -> None:
        """Optimizer steps, a version each; `at` is called before each with its number."""
        self.rollout.engines.clear()  # the fleet publishes
        for _ in range(steps):
            if (wait := at(self.rollout.version)) is not None:
                await wait
            assert await self.rollout.train_step()
            await self.fleet.publish(self.rollout.version, "keep")

    async def run(self, steps: int, at: Callable[[int], Any] = lambda step: None) -> None:
        async with asyncio.timeout(DEADLINE_S), self.fleet.kept():
            await self.fleet.publish(0, "keep")
            generation = asyncio.create_task(self.rollout.rollouter.run())
            await self.train(steps, at)
            await self.rollout.rollouter.stop()
            await generation
        self.rollout.ledger.check()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)
