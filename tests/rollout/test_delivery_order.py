"""One turn at a time, given to who may go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from tidemill.records import Prompt
from tidemill.rollout.delivery_order import Turns
from tidemill.rollout.in_flight import Flight
from tidemill.rollout.staleness import StalenessPolicy

WAIT = StalenessPolicy(1, 4, 100, strategy="wait")  # what started at version 0 must be among the first 8


def started(*versions: int) -> dict[int, Flight]:
    """Groups under way that started at these versions."""
    prompts = [Prompt(n, n, np.zeros(1, np.int32), "", None, {}) for n in range(len(versions))]
    return {n: Flight(prompts[n], n, version, 0.0) for n, version in enumerate(versions)}


class Delivery:
    """A finished group that asks for its turn, and keeps it until `done`."""

    def __init__(self, turns: Turns, flight: Flight) -> None:
        self.turns, self.flight, self.has_turn, self.done = turns, flight, False, asyncio.Event()
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        async with self.turns.turn(self.flight):
            self.has_turn = True
            await self.done.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def asked(turns: Turns, flights: Sequence[Flight]) -> list[Delivery]:
    """Deliveries that all wait."""
    deliveries = [Delivery(turns, flight) for flight in flights]
    await settle()
    return deliveries


async def end(*deliveries: Delivery) -> None:
    for delivery in deliveries:
        delivery.task.cancel()
    await asyncio.gather(*(delivery.task for delivery in deliveries), return_exceptions=True)


async def test_two_that_may_go_but_not_both_go_one_by_one() -> None:
    turns, flights = Turns(WAIT), started(0, 0, 0, 1, 1)
    first, second = await asked(turns, [flights[3], flights[4]])
    turns.next(4, flights)
    await settle()
    assert (first.has_turn, second.has_turn) == (True, False)
    first.done.set()
    await settle()
    del flights[3]
    turns.next(5, flights)  # the three of version 0 need the places 5, 6 and 7 now
    await settle()
    assert not second.has_turn
    del flights[0]  # one of them failed
    turns.next(5, flights)
    await settle()
    assert second.has_turn
    await end(first, second)


async def test_the_last_place_in_time_is_for_the_group_that_needs_it() -> None:
    turns, flights = Turns(WAIT), started(0)
    [only] = await asked(turns, [flights[0]])
    turns.next(7, flights)
    await settle()
    assert only.has_turn
    await end(only)


async def test_who_gives_up_waiting_takes_nobodys_turn_and_ends_nobodys() -> None:
    turns, flights = Turns(WAIT), started(0, 0, 0, 0)
    first, second, third, fourth = await asked(turns, list(flights.values()))
    turns.next(0, flights)
    await settle()
    await end(second)
    del flights[1]
    turns.next(0, flights)
    await settle()
    assert [delivery.has_turn for delivery in (first, third, fourth)] == [True, False, False]
    first.done.set()
    await settle()
    del flights[0]
    turns.next(1, flights)
    await settle()
    assert [third.has_turn, fourth.has_turn] == [True, False]
    await end(first, third, fourth)


async def test_at_the_end_of_a_run_nobody_waits() -> None:
    turns, flights = Turns(WAIT), started(0, 0)
    waiting = await asked(turns, [flights[0]])
    turns.open()
    waiting += await asked(turns, [flights[1]])
    assert [delivery.has_turn for delivery in waiting] == [True, True]
    await end(*waiting)
