"""The bounded queue of finished groups between rollouter and trainer.

    put ─► [ queued, by arrival ] ─► lease ─► acknowledge        (trained: removed)
                   ▲   │                 └──► release ─┐         (not trained: back to the head)
                   │   └─► swept (too old), dropped (drop_oldest)│
                   └─────────────────────────────────────────────┘

Plain asyncio; `actors.queue` runs one in a Ray actor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal

from tidemill.errors import ConfigError, RunError
from tidemill.protocols import Delivery, Lease, Ref

WhenFull = Literal["block", "drop_oldest"]
NO_LEASE = 0  # id of a lease without groups


@dataclass(frozen=True, slots=True)
class Arrival(Generic[Ref]):
    """A delivery and its place in the order of arrival, which it keeps over lease and release."""

    ordinal: int
    delivery: Delivery[Ref]


class MessageQueue(Generic[Ref]):
    """Bounded queue with leases, back-pressure and a staleness bound, oldest version first; implements `Queue`.

    Producers are served in the order of their calls, and so are consumers: a small batch does not overtake a large one.
    A cancelled or timed-out call has stored and taken nothing. `capacity` counts queued groups only, so leased groups
    never block a producer, and a released lease may exceed it for a moment.

    All calls must come from one event loop.
    """

    def __init__(self, capacity: int, max_staleness: int, when_full: WhenFull = "block") -> None:
        """Create an empty, open queue.

        Args:
            capacity: groups queued at most, at least 1.
            max_staleness: a group older than this many versions is swept.
            when_full: make producers wait, or drop the oldest queued groups.

        Raises:
            ConfigError: `capacity` is out of range.
        """
        if capacity < 1:
            raise ConfigError("queue.capacity", capacity, "at least 1", "The queue needs room for one batch.")
        self.capacity, self.max_staleness, self.when_full = capacity, max_staleness, when_full
        self.queued: deque[Arrival[Ref]] = deque()
        self.leases: dict[int, list[Arrival[Ref]]] = {}
        self.closed = False
        self.arrived = self.trained = self.dropped = self.swept = 0
        self.last_lease = NO_LEASE
        self.unreported: tuple[int, ...] = ()  # uids removed in a call whose caller was cancelled
        self.producers: deque[asyncio.Event] = deque()
        self.consumers: deque[asyncio.Event] = deque()

    async def put(self, deliveries: Sequence[Delivery[Ref]], timeout_s: float) -> list[int]:
        """Append in order, waiting for room; returns the uids that `drop_oldest` dropped for it.

        Raises:
            TimeoutError: no room in time; nothing of `deliveries` was stored.
            RunError: the queue is or becomes closed (nothing was stored), or the batch can never fit.
        """
        if len(deliveries) > self.capacity:
            raise RunError(
                f"put of {len(deliveries)} groups into a queue of capacity {self.capacity}: it can never fit; put "
                "fewer at once or raise queue.capacity"
            )
        count = len(deliveries)
        async with self.turn(self.producers, lambda: self.can_put(count), timeout_s, f"room for {count} groups"):
            if self.closed:
                raise RunError(f"put of {count} groups into a closed queue; none of them was stored")
            return self.store(deliveries)

    async def offer(self, batches: Sequence[Sequence[Delivery[Ref]]]) -> list[list[int] | None]:
        """Many puts in one call that never waits.

        Stores the batches one after the other, up to the first that a `put` would not store at once: because the queue
        is full, other producers wait already, or the put would fail.

        Returns:
            For each batch the result of `put`, or None: nothing of it was stored, and the caller has to `put` it.
        """
        answers: list[list[int] | None] = []
        for batch in batches:
            if self.producers or self.closed or len(batch) > self.capacity or not self.can_put(len(batch)):
                break
            answers.append(self.store(batch))
        self.wake()
        return answers + [None] * (len(batches) - len(answers))

    async def lease(self, count: int, version: int, timeout_s: float) -> Lease[Ref]:
        """Take the `count` groups of the oldest versions, ordered by uid; fewer only once the queue is closed.

        Among groups of one version the first arrival goes first. A group that took long arrives after younger ones; in
        order of arrival it would become too old while they are trained (earliest deadline first).

        Groups with `version - usable_version > max_staleness` leave the queue and are named in `swept`. A call that
        sweeps and has too few groups returns at once, with no deliveries and the id `NO_LEASE`: the caller has the
        swept prompts issued again and calls anew. Otherwise it might wait for groups that only it can have issued.

        A closed queue hands out the remaining groups. `ended` says that no queued group follows this lease; another
        open lease may be released and its groups leased again. A lease without groups must not be acknowledged.

        Raises:
            TimeoutError: not enough groups in time; nothing was taken or swept.
            RunError: `count` groups can never be queued at once.
        """
        if not 1 <= count <= self.capacity:
            raise RunError(f"lease of {count} groups from a queue of capacity {self.capacity}. Allowed: 1..capacity")
        waiting_for = f"{count} groups at version {version}"
        async with self.turn(self.consumers, lambda: self.can_lease(count, version), timeout_s, waiting_for):
            swept = self.sweep(version)
            enough = self.closed or len(self.queued) >= count
            taken = self.take(count) if enough else []
            deliveries = tuple(sorted((arrival.delivery for arrival in taken), key=lambda d: d.header.uid))
            return Lease(self.remember(taken), deliveries, swept, ended=self.closed and not self.queued)

    async def acknowledge(self, lease_id: int) -> None:
        """Remove the groups of this lease, which are trained.

        Raises:
            RunError: no lease of this id is open.
        """
        self.trained += len(self.forget(lease_id))

    async def release(self, lease_id: int) -> None:
        """Return the groups of this lease to the queue, at their places by arrival.

        Raises:
            RunError: no lease of this id is open.
        """
        returned = self.forget(lease_id)
        self.queued = deque(sorted([*returned, *self.queued], key=lambda arrival: arrival.ordinal))
        self.wake()

    async def close(self) -> None:
        """No group will follow: waiting producers fail, waiting consumers get the remaining groups. Drops nothing."""
        self.closed = True
        self.wake()

    async def stats(self) -> Mapping[str, float]:
        """`depth`, `leased`, `capacity` now; `put`, `trained`, `dropped`, `swept` so far; all in groups.

        `oldest_version` is that of the queued groups, -1 if the queue is empty.
        """
        return {
            "depth": len(self.queued),
            "leased": sum(map(len, self.leases.values())),
            "capacity": self.capacity,
            "put": self.arrived,
            "trained": self.trained,
            "dropped": self.dropped,
            "swept": self.swept,
            "oldest_version": min((arrival.delivery.header.oldest_version for arrival in self.queued), default=-1),
        }

    @asynccontextmanager
    async def turn(
        self, line: deque[asyncio.Event], ready: Callable[[], bool], timeout_s: float, waiting_for: str
    ) -> AsyncIterator[None]:
        """Wait to be first in `line` and `ready`, then run the body, which must not await, and wake the next waiter.

        A waiter acts itself after it is woken, so a waiter that is cancelled at that moment has changed nothing.
        """
        ticket = asyncio.Event()
        line.append(ticket)
        try:
            async with asyncio.timeout(timeout_s):
                while not (line[0] is ticket and ready()):
                    ticket.clear()
                    await ticket.wait()
            yield
        except TimeoutError:
            raise TimeoutError(f"no {waiting_for} within {timeout_s:g} s; queue: {dict(await self.stats())}") from None
        finally:
            line.remove(ticket)
            self.wake()

    def wake(self) -> None:
        """After a change: wake the first producer and the first consumer; each wakes the next one when it leaves."""
        for line in (self.producers, self.consumers):
            if line:
                line[0].set()

    def can_put(self, count: int) -> bool:
        """Whether a `put` of `count` groups need not wait."""
        return self.closed or self.when_full == "drop_oldest" or len(self.queued) + count <= self.capacity

    def can_lease(self, count: int, version: int) -> bool:
        """Whether a `lease` need not wait."""
        enough = self.closed or len(self.queued) >= count or self.unreported
        return bool(enough) or any(self.stale(arrival, version) for arrival in self.queued)

    def store(self, deliveries: Sequence[Delivery[Ref]]) -> list[int]:
        """Append in order; returns the uids that were dropped for it."""
        dropped = self.drop_oldest(len(deliveries))
        for delivery in deliveries:
            self.arrived += 1
            self.queued.append(Arrival(self.arrived, delivery))
        return dropped

    def stale(self, arrival: Arrival[Ref], version: int) -> bool:
        """Whether a group may no longer be trained at `version`."""
        return version - arrival.delivery.header.usable_version > self.max_staleness

    def drop_oldest(self, count: int) -> list[int]:
        """Make room for `count` groups; without the policy `drop_oldest` the queue has room already."""
        surplus = max(0, len(self.queued) + count - self.capacity)
        self.dropped += surplus
        return [self.queued.popleft().delivery.header.uid for _ in range(surplus)]

    def take(self, count: int) -> list[Arrival[Ref]]:
        """Remove the `count` most urgent groups, or all."""
        taken = sorted(self.queued, key=urgency)[:count]
        ordinals = {arrival.ordinal for arrival in taken}
        self.queued = deque(arrival for arrival in self.queued if arrival.ordinal not in ordinals)
        return taken

    def sweep(self, version: int) -> tuple[int, ...]:
        """Remove groups that are too old; returns their uids, and the `unreported` ones."""
        old = tuple(arrival.delivery.header.uid for arrival in self.queued if self.stale(arrival, version))
        self.queued = deque(arrival for arrival in self.queued if not self.stale(arrival, version))
        self.swept += len(old)
        unreported, self.unreported = self.unreported, ()
        return unreported + old

    def remember(self, taken: list[Arrival[Ref]]) -> int:
        """Open a lease for `taken`."""
        if not taken:
            return NO_LEASE
        self.last_lease += 1
        self.leases[self.last_lease] = taken
        return self.last_lease

    def forget(self, lease_id: int) -> list[Arrival[Ref]]:
        """Close a lease."""
        if lease_id not in self.leases:
            raise RunError(
                f"lease {lease_id} is not open: it was acknowledged or released before, or held no groups. open are "
                f"{sorted(self.leases)}"
            )
        return self.leases.pop(lease_id)


def urgency(arrival: Arrival[Any]) -> tuple[int, int]:
    """Sort key: groups of the oldest version first, and by arrival among those of one version."""
    return arrival.delivery.header.oldest_version, arrival.ordinal
