"""Whose turn it is to be handed to the trainer: the strategy `wait` of `staleness`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tidemill.rollout.in_flight import Flight
from tidemill.rollout.staleness import StalenessPolicy


class Turns:
    """Lets finished groups into the queue one by one, in an order in which none becomes too old.

    With another strategy than `wait`, in the order in which they come.

    Args:
        policy: says which group may go.
    """

    def __init__(self, policy: StalenessPolicy) -> None:
        self._policy = policy
        self._held: dict[int, tuple[Flight, asyncio.Event]] = {}
        self._taken: Flight | None = None
        self._open = policy.strategy != "wait"

    @asynccontextmanager
    async def turn(self, flight: Flight) -> AsyncIterator[None]:
        """Wait for the flight's turn, which lasts as long as the context; `next` gives it."""
        event = asyncio.Event()
        try:
            if not self._open:
                self._held[flight.number] = flight, event
                await event.wait()
            yield
        finally:
            self._held.pop(flight.number, None)
            if self._taken is flight:
                self._taken = None

    def next(self, settled: int, flights: Mapping[int, Flight]) -> None:
        """Give the turn to the group that started first of those that may go.

        Args:
            settled: groups queued or trained since the start of the run, without those in `flights`.
            flights: all groups under way.
        """
        for number, (flight, event) in sorted(self._held.items()):
            if self._taken is not None:
                return
            others = (other.version for other in flights.values() if other is not flight)
            if self._policy.keeps_all_in_time(settled + 1, others):
                self._taken = flight
                del self._held[number]
                event.set()

    def open(self) -> None:
        """Let everybody through: the run ends."""
        self._open = True
        for _, event in self._held.values():
            event.set()
