"""Evaluation of versions on held-out prompts during training, as `evaluation.mode` says.

A score belongs to one version, so the engines that answer must not adopt another one meanwhile:

blocking: the trainer waits for the score.
concurrent: training continues, and the next weight sync waits for the score. Engines serve held-out prompts first.
spare: one engine is reserved. It keeps its version, answers, and catches up afterwards; syncs skip it. If it is the
    only engine, the mode is concurrent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tidemill.errors import EngineLostError
from tidemill.protocols import EngineFleet, Evaluation, Generation
from tidemill.records import EngineId

Mode = Literal["blocking", "concurrent", "spare"]


@dataclass(slots=True)
class Validation:
    """Runs one evaluation at a time."""

    mode: Mode
    generation: Generation
    fleet: EngineFleet
    evaluated: Callable[[int, Evaluation], None]  # called with the step of the policy and its evaluation
    notice: Callable[[str], None]  # called with a warning for the user
    _task: asyncio.Task[None] | None = field(default=None, repr=False)
    _spare: EngineId | None = None

    @property
    def holds_sync(self) -> bool:
        """Whether an evaluation is running on engines that would adopt the next version."""
        return self._task is not None and self._spare is None

    async def begin(self, step: int, version: int) -> None:
        """Evaluate the current version of the engines; returns at once unless the mode is `blocking`."""
        await self.settle()
        if self.mode == "blocking":
            self.evaluated(step, await self.generation.evaluate(version))
            return
        self._spare = await self.fleet.reserve_spare() if self.mode == "spare" else None
        self._task = asyncio.create_task(self._score(step, version, self._spare))

    async def settle(self) -> None:
        """Wait for the running evaluation; every answer has its own deadline."""
        if self._task is not None:
            await self._task
            self._task = None

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _score(self, step: int, version: int, spare: EngineId | None) -> None:
        if spare is None:
            self.evaluated(step, await self.generation.evaluate(version))
            return
        try:
            self.evaluated(step, await self.generation.evaluate(version, spare))
        except EngineLostError as error:
            self.notice(
                f"version {version} has no held-out score, because the only engine with that version was lost: {error}"
            )
        await self.fleet.release_spare(spare)
