"""The training loop with the real rollouter and queue, recorded at every update and weight sync."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_rig import Rig

from tidemill.observe.meters import Timings
from tidemill.protocols import Evaluation, Loads, PauseMode, WeightUpdate
from tidemill.records import Group
from tidemill.train.batch import MicroBatch
from tidemill.train.policy import PolicyRank
from tidemill.train.trainer import Metrics, Position, Ranks, Trainer


@dataclass(frozen=True)
class Moment:
    """The state at the start of an optimizer step or of a weight sync.

    Attributes:
        version: of the engines.
        running: number of groups at the engines.
        groups: of the step.
        mode: of the sync.
    """

    version: int
    running: int
    groups: tuple[Group, ...] = ()
    mode: PauseMode | None = None


@dataclass
class InProcess:
    """A single rank in this process."""

    policy: PolicyRank

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        return self.policy.update(batches[0], denominator, version)


class NoRanks:
    """Makes no update."""

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1}


@dataclass(repr=False)
class Loop:
    """One run. It implements `Ranks`, `EngineFleet` and `Observer` around the parts, to record their calls.

    Attributes:
        steps, syncs: state at the start of each.
        metrics, phases: of each step.
        before_step: awaited before every optimizer step.
        adopting: awaited, with the version, before the engines adopt it.
    """

    rig: Rig
    ranks: Ranks = field(default_factory=NoRanks)
    position: Position = field(default_factory=Position)
    commit: Callable[[Position], Awaitable[None]] | None = None
    before_step: Callable[[], Awaitable[None]] | None = None
    adopting: Callable[[int], Awaitable[None]] | None = None
    steps: list[Moment] = field(default_factory=list)
    syncs: list[Moment] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    phases: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rig = self.rig
        self.trainer = Trainer(rig.config, rig.queue, rig.rollouter, self, self, self, self.commit, self.position)

    async def running(self) -> int:
        return int(sum([(await engine.stats())["running"] for engine in self.rig.engines]))

    def leased(self) -> tuple[Group, ...]:
        """The leased groups, in the order of the trainer."""
        arrivals = [arrival for lease in self.rig.queue.leases.values() for arrival in lease]
        groups = (Group.from_bytes(arrival.delivery.payload) for arrival in arrivals)
        return tuple(sorted(groups, key=lambda group: group.uid))

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        if self.before_step is not None:
            await self.before_step()
        self.steps.append(Moment(self.position.version, await self.running(), self.leased()))
        return await self.ranks.update(batches, denominator, version)

    async def publish(self, version: int, mode: PauseMode, exported: Callable[[], None]) -> Mapping[str, float]:
        exported()
        if self.adopting is not None:
            await self.adopting(version)
        self.syncs.append(Moment(self.position.version, await self.running(), mode=mode))
        await asyncio.gather(*(e.update_weights(WeightUpdate(version, "", 0), mode) for e in self.rig.engines))
        return {"time/sync_adopt": 1.0}

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        self.metrics.append(metrics)

    def synced(self, step: int, metrics: Metrics) -> None:
        """Not recorded: `syncs` has the versions."""

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        self.phases.append([name for name, _, _ in timings.intervals])

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        raise AssertionError("nothing asks for an evaluation here")

    def notice(self, text: str) -> None:
        self.notices.append(text)

    async def fit(self) -> None:
        """Run trainer and rollouter to the end."""
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.rig.rollouter.run())
            await self.trainer.fit()
            await self.rig.rollouter.stop()
        self.rig.ledger.check()

    @property
    def trained(self) -> list[Group]:
        return [group for moment in self.steps for group in moment.groups]

    @property
    def ages(self) -> list[int]:
        """Age of every trained group."""
        return [moment.version - group.oldest_version for moment in self.steps for group in moment.groups]
