"""Pacing: how close to its bound a run comes, under a virtual clock and with heavy-tailed generation times.

Ours is the real Rollouter with its StalenessPolicy, Ledger and MessageQueue. The others are their published rules in a
rollouter of a few lines: verl's count of samples between two syncs, AReaL's capacity with its oldest-first batches, and
dropping what is too old when it is read. Engines and trainer are the same for all: every group has a generation time
of its own, drawn from its uid, which a second attempt does not change; a slot is never slowed down by its neighbours;
an optimizer step takes a constant time and is followed by a weight sync every `--trigger` steps.

The bound is the throughput of whichever side is slower, as if the other were never waited for and nothing thrown away.
Each rule gets the settings of a grid and is shown with the best of those that kept every trained group within
`max age`: ours and drop-on-read hold their setting by force, the others have no such limit, so that it is observed.
Waste is the share of generated tokens that were not trained. Idle is the share of time in which the trainer waited for
groups, and in which an engine slot was empty.

    python benchmarks/pacing.py [--tail lognormal] [--ages 1 2 4] [--versions 40] [--seeds 3] [--json rows.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import selectors
import statistics
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.config import RunConfig
from tidemill.protocols import Delivery, Lease, Sampling
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import Completion, Group, GroupHeader, Int32Array, Prompt, VersionSpan
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rollouter import Rollouter

MEAN_S = 10.0  # generation time of a group
BUDGET = 6.0  # the longest generation, in means: the response budget
TOKENS_PER_S = 4.0
PATIENCE_S = 1e6  # virtual
WARM_UP = 0.2  # of the versions, before the measurement begins


class VirtualSelector(selectors.SelectSelector):
    """Passes the time that the loop would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another: the simulated run is stuck")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when nothing is left to do; deterministic."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        tail: `lognormal` (sigma 1) or `pareto` (alpha 1.5) generation times.
        balance: time to train a version over the time to generate one.
        batch: groups of an optimizer step.
        trigger: optimizer steps of a version.
        slots: groups that the engines run at once.
        versions: to train.
    """

    tail: str
    balance: float
    batch: int
    trigger: int
    slots: int
    versions: int
    seed: int

    @property
    def per_version(self) -> int:
        return self.batch * self.trigger

    @property
    def generate_s(self) -> float:
        """To generate one version's groups with every slot busy."""
        return self.per_version * MEAN_S / self.slots

    @property
    def step_s(self) -> float:
        return self.balance * self.generate_s / self.trigger

    def durations(self) -> np.ndarray:
        """`[N]` seconds of each occurrence, of mean `MEAN_S`, cut at the response budget."""
        count = 40 * self.versions * self.per_version
        rng = np.random.default_rng(self.seed)
        drawn = rng.lognormal(0.0, 1.0, count) if self.tail == "lognormal" else 1 + rng.pareto(1.5, count)
        scale = MEAN_S / drawn.mean()
        for _ in range(20):  # the cut lowers the mean
            scale *= MEAN_S / np.minimum(drawn * scale, BUDGET * MEAN_S).mean()
        return np.minimum(drawn * scale, BUDGET * MEAN_S)


@dataclass
class World:
    """The engines' slots, the policy version, and everything that is measured."""

    scenario: Scenario
    seconds: np.ndarray
    version: int = 0
    busy: int = 0
    busy_s: float = 0.0
    generated_s: float = 0.0
    trained_s: float = 0.0
    waited_s: float = 0.0
    ages: list[int] = field(default_factory=list)
    since: float = 0.0

    async def generate(self, uid: int) -> None:
        """Occupy a slot; also what is cancelled midway was generated."""
        self.occupy(1)
        start = now()
        try:
            await asyncio.sleep(self.seconds[uid])
        finally:
            self.occupy(-1)
            self.generated_s += now() - start

    def occupy(self, change: int) -> None:
        self.busy_s += self.busy * (now() - self.since)
        self.since = now()
        self.busy += change


class SlotEngine:
    """An `Engine` as far as a rollouter needs it."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        version, uid = self.world.version, int(request_id.partition(".")[0])
        await self.world.generate(uid)
        count = max(1, round(self.world.seconds[uid] * TOKENS_PER_S))
        tokens, log_probs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        return [Completion(tokens, log_probs, (VersionSpan(version, 0, count),), "stop") for _ in range(sampling.n)]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """A cancelled generation has left its slot already."""


@dataclass(frozen=True)
class Taken:
    """One group of a batch."""

    uid: int
    oldest_version: int


class Tokenizer:
    """One token a character."""

    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


class NoReward:
    """Scores nothing, at once."""

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        return [(0.0, {}) for _ in responses]


class Ours:
    """The real rollout side and the real queue, at a `max_staleness`."""

    def __init__(self, world: World, max_staleness: int) -> None:
        scenario = world.scenario
        self.world = world
        config = RunConfig.model_validate(
            {
                "name": "pacing",
                "model": "none",
                "data": {"train": "none.jsonl", "shuffle": False},
                "rewards": [{"function": "exact_number"}],
                "rollout": {"group_size": 2, "max_concurrent_groups": scenario.slots, "group_timeout_s": PATIENCE_S},
                "asynchrony": {"max_staleness": max_staleness, "trigger_parameter_sync_step": scenario.trigger},
                "trainer": {
                    "steps": (scenario.versions + max_staleness + 2) * scenario.trigger,
                    "ppo_mini_batch_size": scenario.batch,
                },
            }
        )
        prompts = PromptSet([{"prompt": "?"}], Tokenizer(), config.data, seed=0)
        self.queue: MessageQueue[bytes] = MessageQueue(config.queue_capacity, max_staleness)
        self.rollouter: Rollouter[bytes] = Rollouter(
            config,
            prompts,
            None,
            engines=[SlotEngine(world)],
            queue=self.queue,
            rewards=NoReward(),
            store_payload=bytes,
            decode=lambda tokens: "",
            ledger=Ledger(None),
            version=0,
            clock=asyncio.get_running_loop().time,
        )
        self.lease_id = 0
        self.task = asyncio.create_task(self.rollouter.run())

    async def take(self, count: int) -> list[Taken]:
        while True:
            lease = await self.queue.lease(count, self.world.version, PATIENCE_S)
            await self.rollouter.reissue(lease.swept, "stale")
            if lease.deliveries:
                self.lease_id = lease.lease_id
                return [Taken(d.header.uid, d.header.oldest_version) for d in lease.deliveries]

    async def trained(self, batch: Sequence[Taken]) -> None:
        await self.queue.acknowledge(self.lease_id)
        await self.rollouter.mark_trained([group.uid for group in batch])

    async def begin_version(self, version: int) -> None:
        await self.rollouter.begin_version(version)

    async def stop(self) -> None:
        await self.rollouter.stop()
        await self.task


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


@dataclass(frozen=True)
class Outcome:
    """One simulated run.

    Attributes:
        share: throughput over the bound.
        age, max_age: mean and largest age of a trained group, in versions.
        waste: generated tokens that were not trained, of all generated.
        trainer_idle, engines_idle: share of time.
    """

    setting: str
    share: float
    age: float
    max_age: float
    waste: float
    trainer_idle: float
    engines_idle: float


async def train(world: World, system: Ours | Other, setting: str) -> Outcome:
    """Train all versions; measure from the end of the warm-up on."""
    scenario, start, began = world.scenario, 0.0, 0
    for step in range(scenario.versions * scenario.trigger):
        if step == began + round(WARM_UP * scenario.versions) * scenario.trigger and not began:
            world.occupy(0)
            start, began = now(), step
            world.busy_s = world.waited_s = world.generated_s = world.trained_s = 0.0
        asked = now()
        batch = await system.take(scenario.batch)
        world.waited_s += now() - asked
        world.ages += [world.version - group.oldest_version for group in batch]
        await asyncio.sleep(scenario.step_s)
        world.trained_s += sum(world.seconds[group.uid] for group in batch)
        await system.trained(batch)
        if (step + 1) % scenario.trigger == 0:
            world.version += 1
            await system.begin_version(world.version)
    world.occupy(0)
    elapsed, groups = now() - start, scenario.versions * scenario.per_version - began * scenario.batch
    await system.stop()
    bound = scenario.per_version / max(scenario.generate_s, scenario.step_s * scenario.trigger)
    return Outcome(
        setting,
        share=groups / elapsed / bound,
        age=statistics.mean(world.ages),
        max_age=max(world.ages),
        waste=max(0.0, 1 - world.trained_s / world.generated_s),
        trainer_idle=world.waited_s / elapsed,
        engines_idle=1 - world.busy_s / elapsed / scenario.slots,
    )


def simulate(scenario: Scenario, make: Callable[[World], Ours | Other], setting: str) -> Outcome:
    async def run() -> Outcome:
        world = World(scenario, scenario.durations())
        return await train(world, make(world), setting)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
