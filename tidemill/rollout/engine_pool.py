"""The engines that groups fly on; they come and go while a run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tidemill.errors import EngineError, EngineLostError
from tidemill.protocols import Engine

RESOLUTION_S = (
    0.02  # changes of load that lie closer together become one, so that the report of a large run stays small
)


class LoadMeter:
    """How many requests each engine has in flight, over time.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changes: dict[str, list[tuple[float, int]]] = {}

    def note(self, engine: str, requests: int) -> None:
        """The engine has this many requests from now on."""
        changes, now = self._changes.setdefault(engine, []), self._clock()
        if changes and now - changes[-1][0] < RESOLUTION_S:
            changes[-1] = (changes[-1][0], requests)
        else:
            changes.append((now, requests))

    def take(self) -> dict[str, list[tuple[float, int]]]:
        """The changes since the last report, by engine: time and number of requests; starts anew."""
        changes, self._changes = self._changes, {}
        return changes


@dataclass(slots=True)
class Seat:
    """An engine in the pool.

    Attributes:
        load: requests that it has now.
        failures: requests that failed in a row.
        finished: requests that it has answered.
        lost: why it is of no use any more.
        leaving: it gets nothing new.
        held_out: how many of its requests are held-out prompts.
    """

    name: str
    engine: Engine
    load: int = 0
    failures: int = 0
    finished: int = 0
    lost: str | None = None
    leaving: bool = False
    held_out: int = 0


class EnginePool:
    """Chooses the engine of a group: the one with the fewest failures in a row, then the least loaded.

    An engine that keeps failing answers at once, with an error, and would otherwise look idle and attract every group.
    One that is lost gets nothing more.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._seats = {f"engine {n}": Seat(f"engine {n}", engine) for n, engine in enumerate(engines)}
        self._changed = asyncio.Event()
        self._under_evaluation: set[str] = set()
        self.loads = LoadMeter()

    def __len__(self) -> int:
        return len(self._open())

    def add(self, name: str, engine: Engine) -> None:
        """One more engine."""
        self._seats[name] = Seat(name, engine)
        self._change()

    def remove(self, name: str) -> int:
        """Forget an engine; returns how many requests it had answered, 0 for an unknown one."""
        seat = self._seats.pop(name, None)
        return 0 if seat is None else seat.finished

    def close(self, name: str) -> None:
        """Give an engine nothing new, unless a lease names it."""
        if name in self._seats:
            self._seats[name].leaving = True

    def reopen(self, name: str) -> None:
        """Take that back."""
        if name in self._seats:
            self._seats[name].leaving = False
            self._change()

    async def drained(self, name: str, patience_s: float) -> None:
        """Let the requests of an engine finish, if they do in time."""
        try:
            async with asyncio.timeout(patience_s):
                while (seat := self._seats.get(name)) is not None and seat.load and seat.lost is None:
                    await self._next_change()
        except TimeoutError:
            return

    async def quiet(self, name: str | None, patience_s: float) -> None:
        """Wait until an engine, or all, have no request, also while those of one that is lost say so; if in time."""
        await asyncio.sleep(0)  # for requests that are about to begin
        try:
            async with asyncio.timeout(patience_s):
                while any(seat.load for seat in self._seats.values() if name in (None, seat.name)):
                    await self._next_change()
        except TimeoutError:
            return

    async def loss(self) -> tuple[str, str]:
        """Wait for an engine that is of no use any more; its name, and why it is."""
        while not (lost := self.lost()):
            await self._next_change()
        return next(iter(lost.items()))

    def died_beside_held_out(self, name: str) -> bool:
        """Whether an engine was lost while it also answered a held-out prompt."""
        return name in self._under_evaluation

    async def ready(self, timeout_s: float) -> None:
        """Wait until there is an engine.

        Raises:
            EngineError: there is none in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._open():
                    await self._next_change()
        except TimeoutError as error:
            raise EngineError(f"all engines are lost, and no other has come within {timeout_s:g} s") from error

    @contextmanager
    def lease(self, name: str | None = None, *, held_out: bool = False) -> Iterator[Seat]:
        """An engine, or the named one, for the time of one request, which may be that of a held-out prompt.

        An exception other than cancellation counts as its failure.

        Raises:
            EngineLostError: there is none.
        """
        seats = self._open() if name is None else [s for s in self._seats.values() if s.name == name and s.lost is None]
        if not seats:
            raise EngineLostError(f"{name or 'every engine'} is lost")
        seat = min(seats, key=lambda seat: (seat.failures, seat.load))
        seat.load += 1
        seat.held_out += held_out
        self.loads.note(seat.name, seat.load)
        try:
            yield seat
        except EngineLostError as error:
            self._lose(seat, str(error))
            raise
        except Exception:
            seat.failures += 1
            raise
        else:
            seat.failures = 0
            seat.finished += 1
        finally:
            seat.load -= 1
            seat.held_out -= held_out
            self.loads.note(seat.name, seat.load)
            self._change()

    def lost(self) -> Mapping[str, str]:
        """Engines that are of no use any more and still have to be removed, and why."""
        return {name: seat.lost for name, seat in self._seats.items() if seat.lost is not None}

    def forgive(self) -> None:
        """Forget the failures: engines that failed may work with new weights."""
        for seat in self._seats.values():
            seat.failures = 0

    def _lose(self, seat: Seat, why: str) -> None:
        """The first request that says so still has the others beside it."""
        if seat.lost is None:
            seat.lost = why
            if seat.held_out:
                self._under_evaluation.add(seat.name)

    def _open(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.lost is None and not seat.leaving]

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _next_change(self) -> None:
        await self._changed.wait()
