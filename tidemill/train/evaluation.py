"""Held-out scores of a run's versions, in the way of `evaluation.mode`.

A score belongs to one version, so the engines that answer must not adopt another one meanwhile:

blocking: the trainer waits for the score.
concurrent: training goes on, and the next weight sync waits for the score. Engines serve held-out prompts first.
spare: one engine is set aside. It keeps the version, answers, and catches up afterwards; syncs pass it by. Where only
    one engine is left, as concurrent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tidemill.errors import EngineLostError
from tidemill.protocols import Evaluation, Generation
from tidemill.records import EngineId

Mode = Literal["blocking", "concurrent", "spare"]


class Spares(Protocol):
    """Who can set an engine aside: `rollout.fleet.Fleet`."""

    async def set_aside(self) -> EngineId | None:
        """Take an engine out of rotation and publications as it is; None if it is the only one."""
        ...

    async def take_back(self, engine: EngineId) -> None:
        """Give it the newest version, and then groups again."""
        ...


@dataclass(slots=True)
class Validation:
    """One evaluation at a time.

    Attributes:
        evaluated: is told of a score, with the optimizer steps that made the policy.
        notice: tells a person.
    """

    mode: Mode
    generation: Generation
    fleet: Spares
    evaluated: Callable[[int, Evaluation], None]
    notice: Callable[[str], None]
    _task: asyncio.Task[None] | None = field(default=None, repr=False)
    _spare: EngineId | None = None

    @property
    def holds_sync(self) -> bool:
        """Whether an evaluation is under way on engines that the next version would reach."""
        return self._task is not None and self._spare is None

    async def begin(self, step: int, version: int) -> None:
        """Score the engines' present version; returns at once unless the mode is `blocking`.

        Raises:
            TidemillError: what went wrong in the evaluation before.
        """
        await self.settle()
        if self.mode == "blocking":
            self.evaluated(step, await self.generation.evaluate(version))
            return
        self._spare = await self.fleet.set_aside() if self.mode == "spare" else None
        self._task = asyncio.create_task(self._score(step, version, self._spare))

    async def settle(self) -> None:
        """Wait for the evaluation under way; its deadlines are those of its answers.

        Raises:
            TidemillError: what went wrong in it.
        """
        if self._task is not None:
            await self._task
            self._task = None

    async def cancel(self) -> None:
        """Give up the evaluation under way, if there is one: the run ends otherwise than it should."""
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
            self.notice(f"version {version} has no held-out score, because no other engine had it any more: {error}")
        await self.fleet.take_back(spare)
