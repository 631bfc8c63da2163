"""The others: their published rules, and a rollouter that follows a rule."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulation.world import Scenario, Taken, World


@dataclass
class Counts:
    """What the rules of the others see.

    Attributes:
        running: groups being generated.
        queued: finished and not taken.
        finished: since the start.
        since_sync: started since the last sync, and running or queued at it.
    """

    version: int = 0
    running: int = 0
    queued: int = 0
    finished: int = 0
    since_sync: int = 0


@dataclass(frozen=True)
class Rule:
    """Another system's pacing: how many groups may start, in which order they are trained, which are dropped."""

    setting: str
    capacity: Callable[[Counts], float]
    oldest_first: bool = False
    drops_older_than: float = math.inf


def verl(scenario: Scenario, threshold: float) -> Rule:
    """`max_required_samples` of its fully asynchronous trainer: nothing is dropped, first come first trained."""
    limit = int(scenario.per_version * (1 + threshold))
    return Rule(f"staleness_threshold {threshold:g}", lambda c: min(scenario.slots - c.running, limit - c.since_sync))


def areal(scenario: Scenario, eta: int) -> Rule:
    """`StalenessManager.get_capacity` with batches by time of submission: nothing is dropped."""

    def capacity(c: Counts) -> float:
        allowed = (eta + c.version + 1) * scenario.per_version
        return min(scenario.slots - c.running, allowed - (c.finished + c.running))

    return Rule(f"max_head_offpolicyness {eta}", capacity, oldest_first=True)


def drop_on_read(scenario: Scenario, max_age: int, room: float) -> Rule:
    """Generate while the queue has room for so many versions' groups; the reader drops what is too old."""
    limit = round(room * scenario.per_version)
    return Rule(
        f"queue of {room:g} versions",
        lambda c: min(scenario.slots - c.running, limit - c.queued - c.running),
        drops_older_than=max_age,
    )


class Other:
    """A rollouter that follows a rule."""

    def __init__(self, world: World, rule: Rule) -> None:
        self.world, self.rule, self.counts = world, rule, Counts()
        self.queue: list[Taken] = []
        self.uids = iter(range(len(world.seconds)))
        self.again: list[int] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived = asyncio.Event()
        self.admit()

    def admit(self) -> None:
        while self.rule.capacity(self.counts) >= 1:
            uid = self.again.pop(0) if self.again else next(self.uids)
            self.counts.running += 1
            self.counts.since_sync += 1
            task = asyncio.create_task(self.fly(uid))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def fly(self, uid: int) -> None:
        version = self.world.version
        await self.world.generate(uid)
        self.counts.running -= 1
        self.counts.finished += 1
        self.queue.append(Taken(uid, version))
        self.changed()

    def changed(self) -> None:
        self.counts.queued = len(self.queue)
        self.arrived.set()
        self.admit()

    async def take(self, count: int) -> list[Taken]:
        while True:
            self.drop()
            if len(self.queue) >= count:
                break
            self.arrived.clear()
            await self.arrived.wait()
        if self.rule.oldest_first:
            self.queue.sort(key=lambda group: group.uid)  # uids are given out in order
        batch, self.queue = self.queue[:count], self.queue[count:]
        self.changed()
        return batch

    def drop(self) -> None:
        old = [group for group in self.queue if self.world.version - group.oldest_version > self.rule.drops_older_than]
        if old:
            self.world.discard(group.uid for group in old)
            self.again += [group.uid for group in old]
            self.queue = [group for group in self.queue if group not in old]
            self.changed()

    async def trained(self, batch: Sequence[Taken]) -> None:
        """No rule looks at it."""

    async def begin_version(self, version: int) -> None:
        self.counts.version = version
        self.counts.since_sync = self.counts.running + self.counts.queued
        self.admit()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
