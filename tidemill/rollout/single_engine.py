"""One engine at a time, and another in place of one that dies: for scores outside of a run, where there is no fleet."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tidemill.errors import EngineError
from tidemill.protocols import Engine
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.rollout.group_request import TIMEOUTS

PLACE = "the engine"
T = TypeVar("T")


class Runner(Engine, Protocol):
    """An engine that has to be started: `inference.engine.VllmEngine`."""

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: it could not.
        """
        ...


class Relay:
    """Keeps one engine in a pool.

    Args:
        make: an engine that is not started yet.

    Attributes:
        pool: with the engine that is at work.
    """

    def __init__(self, make: Callable[[], Runner]) -> None:
        self._make, self._engine = make, make()
        self._names = (f"engine {number}" for number in itertools.count())
        self._crashes = CrashLoop(time.monotonic)
        self.pool = EnginePool([])

    async def start(self) -> None:
        """Start the engine.

        Raises:
            EngineError: it could not.
        """
        await self._engine.start()
        self.pool.add(next(self._names), self._engine)

    async def end(self) -> None:
        """End the engine."""
        await self._engine.shutdown()

    async def during(self, work: Coroutine[Any, Any, T], explained: Callable[[str], int]) -> T:
        """Do some work on the pool; an engine that dies under it is replaced.

        Args:
            work: on the pool.
            explained: how many of its requests are to blame for the death of an engine.

        Raises:
            EngineError: the next engine does not start, or one after the other dies without finishing anything.
        """
        working, keeping = asyncio.create_task(work), asyncio.create_task(self._keep(explained))
        try:
            await asyncio.wait([working, keeping], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else keeping.result()
        finally:
            working.cancel()
            keeping.cancel()
            await asyncio.wait([working, keeping])

    async def _keep(self, explained: Callable[[str], int]) -> Any:
        """Never returns."""
        while True:
            name, why = await self.pool.loss()
            await self.pool.quiet(name, TIMEOUTS.answer_s)
            finished = self.pool.remove(name) + explained(name)
            if self._crashes.lost(PLACE, finished) >= LOSSES:
                raise EngineError(f"{LOSSES} engines in a row died without finishing a request: {why}")
            await self._engine.shutdown()
            self._engine = self._make()
            await self.start()
