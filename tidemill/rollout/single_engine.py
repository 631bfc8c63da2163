"""One engine at a time, and a new one in place of one that dies: for scores outside of a run, which need no fleet."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tidemill.errors import EngineError
from tidemill.protocols import Engine
from tidemill.records import EngineId
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.rollout.group_request import TIMEOUTS

SLOT = EngineId(0)
T = TypeVar("T")


class Runner(Engine, Protocol):
    """An engine that has to be started: `inference.engine.VllmEngine`."""

    async def start(self) -> None:
        """Load the model.

        Raises:
            EngineError: it could not.
        """
        ...


class SingleEngine:
    """Keeps one engine in a pool.

    Args:
        make: an engine that is not started yet.

    Attributes:
        pool: with the engine that is at work.
    """

    def __init__(self, make: Callable[[], Runner]) -> None:
        self._make, self._engine = make, make()
        self._ids = map(EngineId, itertools.count())
        self._crashes = CrashLoop(time.monotonic)
        self.pool = EnginePool({})

    async def start(self) -> None:
        """Start the engine.

        Raises:
            EngineError: it could not.
        """
        await self._engine.start()
        self.pool.add(next(self._ids), self._engine)

    async def end(self) -> None:
        """End the engine."""
        await self._engine.shutdown()

    async def during(self, work: Coroutine[Any, Any, T], explained: Callable[[EngineId], int]) -> T:
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

    async def _keep(self, explained: Callable[[EngineId], int]) -> Any:
        """Never returns."""
        while True:
            engine_id, why = await self.pool.loss()
            await self.pool.quiet(engine_id, TIMEOUTS.answer_s)
            finished = self.pool.remove(engine_id) + explained(engine_id)
            if self._crashes.lost(SLOT, finished) >= LOSSES:
                raise EngineError(f"{LOSSES} engines in a row died without finishing a request: {why}")
            await self._engine.shutdown()
            self._engine = self._make()
            await self.start()
