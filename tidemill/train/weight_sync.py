"""Publishes versions while training goes on.

    trainer  ─ update ─ update ─► export ─ update ─ update ─► export ─ ...
                                    │                           ▲
    engines                         └─► adopt ─► canary ────────┘  one version at a time

The trainer waits for the export only; its weights may change after that. The groups that it trains until the adoption
are of older versions; their age is counted from the exported one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from tidemill.observe.meters import Interval, Timings
from tidemill.observe.metrics import aggregate
from tidemill.protocols import EngineFleet, Generation, PauseMode


@dataclass(slots=True)
class WeightSync:
    """Publishes one version after the other."""

    fleet: EngineFleet
    generation: Generation
    mode: PauseMode
    tasks: asyncio.TaskGroup  # run the adoption; a failure there ends all of them
    _adoption: asyncio.Task[None] | None = field(default=None, repr=False)
    _reports: list[Mapping[str, float]] = field(default_factory=list)
    _timings: Timings = field(default_factory=Timings)

    @property
    def under_way(self) -> bool:
        return self._adoption is not None and not self._adoption.done()

    async def begin(self, version: int) -> None:
        """Publish the trainer's weights; returns when they may change. All engines have the previous version then."""
        await self.settle()
        exported = asyncio.Event()
        self._adoption = self.tasks.create_task(self._publish(version, exported.set))
        await exported.wait()

    async def settle(self) -> None:
        """Wait until the engines generate with the newest version."""
        if self._adoption is not None:
            await asyncio.wait([self._adoption])  # cancelling this wait does not cancel the adoption
            self._adoption.result()
            self._adoption = None

    def cancel(self) -> None:
        if self._adoption is not None:
            self._adoption.cancel()

    def take(self) -> dict[str, float]:
        reports, self._reports = self._reports, []
        return aggregate(reports)

    def take_intervals(self) -> list[Interval]:
        taken = self._timings.intervals.copy()
        self._timings.intervals.clear()
        return taken

    async def _publish(self, version: int, exported: Callable[[], None]) -> None:
        with ExitStack() as adoption:

            def train_on() -> None:
                adoption.enter_context(self._timings.phase("adopt"))
                exported()

            report = await self.fleet.publish(version, self.mode, train_on)
            await self.generation.begin_version(version)
        self._reports.append(report)
