"""The other systems: their published rules, a rollouter that follows a rule, and one that knows the future."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulation.clock import now
from simulation.world import Scenario, Taken, World


@dataclass
class Counts:
    """The state that a rule may use.

    Attributes:
        running: groups being generated.
        queued: groups finished and not taken.
        finished: groups since the start, without dropped ones.
        since_sync: groups started since the last sync, plus those running or queued at the sync.
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
    """`max_required_samples` of its fully asynchronous trainer: nothing is dropped, training in order of arrival."""
    limit = int(scenario.per_version * (1 + threshold))
    return Rule(f"staleness_threshold {threshold:g}", lambda c: min(scenario.slots - c.running, limit - c.since_sync))


def areal(scenario: Scenario, eta: int) -> Rule:
    """`StalenessManager.get_capacity` with batches by time of submission: nothing is dropped."""

    def capacity(c: Counts) -> float:
        allowed = (eta + c.version + 1) * scenario.per_version
        return min(scenario.slots - c.running, allowed - (c.finished + c.running))

    return Rule(f"max_head_offpolicyness {eta}", capacity, oldest_first=True)


def drop_on_read(scenario: Scenario, max_age: int, room: float) -> Rule:
    """Generate while the queue has room, in groups of `room` versions; the reader drops groups that are too old."""
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
        self.reissued: list[int] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived = asyncio.Event()
        self.admit()

    def admit(self) -> None:
        while self.rule.capacity(self.counts) >= 1:
            uid = self.choose()
            if uid is None:
                return
            self.counts.running += 1
            self.counts.since_sync += 1
            task = asyncio.create_task(self.generate(uid))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def choose(self) -> int | None:
        """The occurrence to start next; None leaves the slot empty until the next change."""
        return self.reissued.pop(0) if self.reissued else next(self.uids)

    async def generate(self, uid: int) -> None:
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
            self.queue.sort(key=lambda group: (group.oldest_version, group.uid))
        batch, self.queue = self.queue[:count], self.queue[count:]
        self.changed()
        return batch

    def drop(self) -> None:
        old = [group for group in self.queue if self.world.version - group.oldest_version > self.rule.drops_older_than]
        if old:
            self.world.discard(group.uid for group in old)
            self.counts.finished -= len(old)
            self.reissued += [group.uid for group in old]
            self.queue = [group for group in self.queue if group not in old]
            self.changed()

    async def trained(self, batch: Sequence[Taken]) -> None:
        """No rule depends on it."""

    async def begin_version(self, version: int) -> None:
        self.counts.version = version
        self.counts.since_sync = self.counts.running + self.counts.queued
        self.admit()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def paced(scenario: Scenario, max_age: int) -> Rule:
    """Tidemill's pace without the hard bound on single groups, which a clairvoyant never reaches."""
    return replace(areal(scenario, max_age), setting="knows every time", drops_older_than=max_age)


class Clairvoyant(Other):
    """Knows how long each prompt will take, and starts the longest candidate that can still be trained.

    The candidates are the prompts of the next version. A group is in time if it ends before the last batch of the last
    version that may train it, where a version lasts as long as at the bound. At a maximum age of 0 the trainer waits
    for all groups.
    """

    def __init__(self, world: World, rule: Rule, max_age: int) -> None:
        self.max_age, self.began = max_age, now()
        super().__init__(world, rule)

    def choose(self) -> int | None:
        scenario = self.world.scenario
        self.reissued += itertools.islice(self.uids, max(0, scenario.per_version - len(self.reissued)))
        version_s = max(scenario.generate_s, scenario.step_s * scenario.trigger)
        latest = self.began + (self.max_age + 1) * version_s - scenario.step_s if self.max_age else math.inf
        left_s = latest - now()
        fitting = [uid for uid in self.reissued if self.world.seconds[uid] <= left_s]
        if not fitting:
            return None
        uid = max(fitting, key=lambda uid: self.world.seconds[uid])
        self.reissued.remove(uid)
        return uid

    async def begin_version(self, version: int) -> None:
        self.began = now()
        await super().begin_version(version)
