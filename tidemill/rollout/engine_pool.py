"""The engines that get the requests; they join and leave during a run.

The fleet owns the membership. It calls the pool at every change. The pool counts the requests of each engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tidemill.errors import EngineError, EngineLostError
from tidemill.protocols import Engine
from tidemill.records import EngineId

# Changes of load that lie closer together become one, so that the report of a large run stays small.
RESOLUTION_S = 0.02


class LoadMeter:
    """How many requests each engine has in flight, over time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changes: dict[EngineId, list[tuple[float, int]]] = {}

    def note(self, engine: EngineId, requests: int) -> None:
        changes, now = self._changes.setdefault(engine, []), self._clock()
        if changes and now - changes[-1][0] < RESOLUTION_S:
            changes[-1] = (changes[-1][0], requests)
        else:
            changes.append((now, requests))

    def take(self) -> dict[EngineId, list[tuple[float, int]]]:
        """The changes since the last report, by engine: time and number of requests; starts anew."""
        changes, self._changes = self._changes, {}
        return changes


@dataclass(slots=True)
class PooledEngine:
    """An engine in the pool."""

    id: EngineId
    engine: Engine
    load: int = 0  # requests in flight
    failures: int = 0  # requests that failed in a row
    finished: int = 0  # requests that it has answered
    lost: str | None = None  # why it cannot be used any more
    kept_version: int | None = None  # of a cordoned engine, which gets neither new requests nor newer versions
    held_out: int = 0  # how many of its requests are held-out prompts


class EnginePool:
    """Chooses the engine of a request: the one with the fewest failures in a row, then the least loaded.

    An engine that keeps failing answers at once, with an error; by its load alone it would attract every request.
    """

    def __init__(self, engines: Mapping[EngineId, Engine]) -> None:
        self._engines = {engine_id: PooledEngine(engine_id, engine) for engine_id, engine in engines.items()}
        self._changed = asyncio.Event()
        self._under_evaluation: set[EngineId] = set()
        self.loads = LoadMeter()

    def __len__(self) -> int:
        return len(self._open())

    def add(self, engine_id: EngineId, engine: Engine) -> None:
        self._engines[engine_id] = PooledEngine(engine_id, engine)
        self._change()

    def remove(self, engine_id: EngineId) -> int:
        pooled = self._engines.pop(engine_id, None)
        return 0 if pooled is None else pooled.finished

    def cordon(self, engine_id: EngineId, version: int) -> None:
        """Send an engine no new requests, except those that name it; it keeps its version."""
        if engine_id in self._engines:
            self._engines[engine_id].kept_version = version

    def uncordon(self, engine_id: EngineId) -> None:
        if engine_id in self._engines:
            self._engines[engine_id].kept_version = None
            self._change()

    def kept_version(self, engine_id: EngineId | None) -> int | None:
        pooled = None if engine_id is None else self._engines.get(engine_id)
        return None if pooled is None else pooled.kept_version

    async def drained(self, engine_id: EngineId, timeout_s: float) -> None:
        """Wait until an engine has finished its requests or is lost, at most `timeout_s`."""

        def busy() -> bool:
            pooled = self._engines.get(engine_id)
            return pooled is not None and pooled.load > 0 and pooled.lost is None

        await self._while(busy, timeout_s)

    async def quiet(self, engine_id: EngineId | None, timeout_s: float) -> None:
        """Wait until an engine, or every engine, has no request, at most `timeout_s`.

        The requests of a lost engine count until they have failed.
        """
        await asyncio.sleep(0)  # for requests that are about to begin
        await self._while(lambda: any(e.load for e in self._engines.values() if engine_id in (None, e.id)), timeout_s)

    async def loss(self) -> tuple[EngineId, str]:
        """Wait until an engine is lost; returns which one, and why."""
        while not (lost := self.lost()):
            await self._changed.wait()
        return next(iter(lost.items()))

    def died_beside_held_out(self, engine_id: EngineId) -> bool:
        """Whether an engine was lost while it also answered a held-out prompt."""
        return engine_id in self._under_evaluation

    async def ready(self, timeout_s: float) -> None:
        """Wait until an engine takes requests."""
        await self._while(lambda: not self._open(), timeout_s)
        if not self._open():
            raise EngineError(f"all engines are lost, and no other one has joined within {timeout_s:g} s")

    @contextmanager
    def lease(self, engine_id: EngineId | None = None, *, held_out: bool = False) -> Iterator[PooledEngine]:
        """Lease an engine for one request; an exception other than cancellation counts as its failure.

        Args:
            engine_id: the engine to use; None takes the best one.
            held_out: whether the request is a held-out prompt.

        Raises:
            EngineLostError: the engine, or every engine, is lost.
        """
        named = [e for e in self._engines.values() if e.id == engine_id and e.lost is None]
        engines = self._open() if engine_id is None else named
        if not engines:
            raise EngineLostError(f"{engine_id or 'every engine'} is lost")
        pooled = min(engines, key=lambda e: (e.failures, e.load))
        pooled.load += 1
        pooled.held_out += held_out
        self.loads.note(pooled.id, pooled.load)
        try:
            yield pooled
        except EngineLostError as error:
            self._lose(pooled, str(error))
            raise
        except Exception:
            pooled.failures += 1
            raise
        else:
            pooled.failures = 0
            pooled.finished += 1
        finally:
            pooled.load -= 1
            pooled.held_out -= held_out
            self.loads.note(pooled.id, pooled.load)
            self._change()

    def lost(self) -> Mapping[EngineId, str]:
        """Engines that are lost and still have to be removed, and why."""
        return {pooled.id: pooled.lost for pooled in self._engines.values() if pooled.lost is not None}

    def forgive(self) -> None:
        """Forget the failures: engines that failed may work with new weights."""
        for pooled in self._engines.values():
            pooled.failures = 0

    def _lose(self, pooled: PooledEngine, why: str) -> None:
        """Only when the first request reports the loss, the other requests still count."""
        if pooled.lost is None:
            pooled.lost = why
            if pooled.held_out:
                self._under_evaluation.add(pooled.id)

    def _open(self) -> list[PooledEngine]:
        return [pooled for pooled in self._engines.values() if pooled.lost is None and pooled.kept_version is None]

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _while(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while condition():
                    await self._changed.wait()
