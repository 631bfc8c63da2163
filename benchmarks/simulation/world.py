"""The part that all simulated systems share: generation times, the engines' slots, and the measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulation.clock import now
from tidemill.records import Int32Array
from tidemill.rollout.prompts import epoch_order

MEAN_S = 10.0  # generation time of a group
ROUNDING_S = 1e-6
GROUPS_PER_ENGINE = 16
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Scenario:
    """The parameters of a simulation.

    Attributes:
        tail: `lognormal` (sigma 1) or `pareto` (alpha 1.5) generation times, of mean `MEAN_S`.
        longest: generation time at which the response budget ends, over the time that a version takes at the bound.
        balance: time to train a version over the time to generate one.
        batch: groups of an optimizer step.
        trigger: optimizer steps of a version.
        engines: number of engines, each with `GROUPS_PER_ENGINE` slots.
        versions: number of versions to train.
        epochs: how often each prompt is trained; 1: the data never repeats.
        noise: deviation of the logarithm of a prompt's generation time from one epoch to another.
        export_s: time for which the trainer stops at a sync.
        pause_s: time for which the engines stop after that.
        scatter: deviation of the logarithm of the response lengths within a group; the longest takes the group's time.
        seed: of the generation times, of the lengths within groups, and of the order of the data.
    """

    tail: str
    longest: float
    balance: float
    batch: int
    trigger: int
    engines: int
    versions: int
    epochs: int
    noise: float
    export_s: float
    pause_s: float
    scatter: float
    seed: int

    @property
    def slots(self) -> int:
        return GROUPS_PER_ENGINE * self.engines

    @property
    def per_version(self) -> int:
        return self.batch * self.trigger

    @property
    def generate_s(self) -> float:
        """Time to generate one version's groups with every slot busy."""
        return self.per_version * MEAN_S / self.slots

    @property
    def step_s(self) -> float:
        return self.balance * self.generate_s / self.trigger

    @property
    def warm_up(self) -> int:
        """Versions before the measurement begins; few with several epochs, because the first epoch counts."""
        return round((0.2 if self.epochs == 1 else 0.05) * self.versions)

    @property
    def occurrences(self) -> int:
        """Enough for every rule: drop-on-read generates many times more groups than are trained."""
        return 20 * self.versions * self.per_version

    @property
    def prompts(self) -> int:
        """Rows of the data."""
        return self.occurrences if self.epochs == 1 else self.versions * self.per_version // self.epochs

    def durations(self) -> FloatArray:
        """`[N]` seconds of each occurrence: its prompt's, with noise if prompts repeat, up to the budget."""
        budget = self.longest * self.generate_s * max(1.0, self.balance)
        rng = np.random.default_rng(self.seed)
        lognormal = self.tail == "lognormal"
        drawn = rng.lognormal(0.0, 1.0, self.prompts) if lognormal else 1 + rng.pareto(1.5, self.prompts)
        if self.epochs > 1:
            drawn = drawn[self.rows()] * rng.lognormal(0.0, self.noise, self.occurrences)
        for _ in range(50):  # cutting lowers the mean
            drawn *= MEAN_S / np.minimum(drawn, budget).mean()
        return np.minimum(drawn, budget)

    def rows(self) -> Int32Array:
        """`[N]` the row of each occurrence, as `PromptSet` orders them."""
        epochs = range(-(-self.occurrences // self.prompts))
        orders = [epoch_order(self.prompts, self.seed, epoch, self.epochs > 1) for epoch in epochs]
        return np.concatenate(orders)[: self.occurrences]


@dataclass
class World:
    """The engines' slots, the policy version and the measurements. The engines' time excludes their pauses."""

    scenario: Scenario
    seconds: FloatArray
    version: int = 0
    paused_until: float = 0.0
    stood_s: float = 0.0
    began: list[float] = field(default_factory=lambda: [0.0])
    busy: int = 0
    since: float = 0.0
    busy_s: float = 0.0
    wasted_s: float = 0.0
    taken_s: float = 0.0
    masked_s: float = 0.0
    waited_s: float = 0.0
    reset_at: float = 0.0
    ages: list[int] = field(default_factory=list)

    async def generate(self, uid: int) -> tuple[float, float]:
        """Occupy a slot for the time of this occurrence; the time of a cancelled generation is wasted.

        Returns:
            When it began and ended, in the engines' time.
        """
        start = self.engine_time()
        self.occupy(1)
        try:
            while (left_s := start + self.seconds[uid] - self.engine_time()) > ROUNDING_S:
                await asyncio.sleep(left_s + self.pause_left_s())
        except asyncio.CancelledError:
            self.wasted_s += self.engine_time() - start
            raise
        finally:
            self.occupy(-1)
        return start, start + self.seconds[uid]

    def begin_version(self) -> None:
        """Begin a version; the engines stop for its weights."""
        self.began.append(self.engine_time())
        self.version += 1
        self.paused_until = now() + self.scenario.pause_s
        self.stood_s += self.scenario.pause_s

    def engine_time(self) -> float:
        return now() - self.stood_s + self.pause_left_s()

    def pause_left_s(self) -> float:
        return max(0.0, self.paused_until - now())

    def occupy(self, change: int) -> None:
        """Occupy or free slots, and account for the time until now."""
        time = self.engine_time()
        self.busy_s += self.busy * (time - self.since)
        self.since = time
        self.busy += change

    def learn(self, batch: Sequence[Taken]) -> None:
        """Account for a trained batch; its masked tokens are wasted."""
        self.ages += [self.version - group.oldest_version for group in batch]
        self.taken_s += sum(self.seconds[group.uid] for group in batch)
        self.masked_s += sum((1 - group.share) * self.seconds[group.uid] for group in batch)

    def discard(self, uids: Iterable[int]) -> None:
        """Account for groups that are dropped as a whole."""
        self.wasted_s += sum(self.seconds[uid] for uid in uids)

    def reset(self) -> None:
        """Begin the measurement."""
        self.occupy(0)
        self.busy_s = self.wasted_s = self.taken_s = self.masked_s = self.waited_s = 0.0
        self.reset_at = now()
        self.ages.clear()


@dataclass(frozen=True)
class Taken:
    """One group of a batch.

    Attributes:
        uid: of the occurrence.
        oldest_version: of any token that is trained.
        share: of its tokens that is trained.
    """

    uid: int
    oldest_version: int
    share: float = 1.0
