"""The training loop; a step is a sequence of named, timed phases.

A step leases `asynchrony.require_batches` mini-batches and makes one optimizer step with each of them.

    queue ─► get groups ─► advantages ─► pack ─► update actor ─► acknowledge ─► sync weights ─► checkpoint
                                                                                   │
    engines adopt the new version in flight, during the next step ◄────────────────┘

The trainer depends on protocols only, so the whole loop also runs with `tidemill.fakes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tidemill.config.run import RunConfig
from tidemill.errors import RunError
from tidemill.observe.meters import Timings
from tidemill.observe.metrics import aggregate, group_metrics
from tidemill.protocols import EngineFleet, Evaluation, Generation, Lease, Loads, Queue
from tidemill.records import Float32Array, Group
from tidemill.task_group import task_group
from tidemill.train.advantages import estimate, rollout_means
from tidemill.train.batch import MicroBatch, mask_stale, micro_batches, step_denominator
from tidemill.train.evaluation import Validation
from tidemill.train.packing import PackedRow, pack_group
from tidemill.train.stop import Stop
from tidemill.train.weight_sync import WeightSync

Metrics = dict[str, float]
T = TypeVar("T")


class Ranks(Protocol):
    """The data-parallel group of trainer processes."""

    async def update(
        self, batches: Sequence[Sequence[MicroBatch]], denominator: float, version: int
    ) -> Mapping[str, float]:
        """One optimizer step over all ranks; returns loss, gradient norm and ratio statistics."""
        ...


class Observer(Protocol):
    """Receives the progress of training: `driver.observer.RunObserver`."""

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        """A step is done, with all its metrics."""
        ...

    def synced(self, step: int, metrics: Metrics) -> None:
        """Engines adopted a version before the first step or after the last one; `metrics` are those of the sync."""
        ...

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        """The phases of a step, and the load of the engines meanwhile."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """The policy after `step` steps has a held-out score."""
        ...

    def notice(self, text: str) -> None:
        """A warning for the user that does not end the run."""
        ...


@dataclass(slots=True)
class Position:
    """The progress of a run; part of every checkpoint."""

    step: int = 0  # steps done
    version: int = 0  # of the trainer: the number of weight syncs begun; engines may not have adopted the last one yet
    groups: int = 0  # groups trained
    response_tokens: int = 0  # response tokens trained
    max_age: int = 0  # largest age of a trained token so far, in versions
    seconds: float = 0.0  # training time of all attempts of this run
    unsynced: int = 0  # steps since the last weight sync
    restarts: int = 0  # how often the run continued from a checkpoint


@dataclass(slots=True)
class Trainer:
    """Consumes groups, updates the policy and publishes new versions.

    Attributes:
        commit: writes a checkpoint of a position; None trains without checkpoints.
        stop: ends training early.
    """

    config: RunConfig
    queue: Queue[Any]
    generation: Generation
    ranks: Ranks
    fleet: EngineFleet
    observer: Observer
    commit: Callable[[Position], Awaitable[None]] | None = None
    position: Position = field(default_factory=Position)
    stop: Stop = field(default_factory=Stop)
    validation: Validation = field(init=False)
    syncs: WeightSync = field(init=False)

    def __post_init__(self) -> None:
        observer, mode = self.observer, self.config.evaluation.mode
        self.validation = Validation(mode, self.generation, self.fleet, observer.evaluated, observer.notice)

    async def fit(self) -> None:
        """Train until the last step, the end of the data or a stop, and publish the last update.

        At the start, the engines hold the current parameters as the current version. If the previous attempt stopped
        immediately in the middle of a version, a whole version begins.

        Consumes: groups of the queue. Produces: versions, checkpoints, metrics. Waits for: a full batch, at most
        `trainer.get_timeout_s`.

        Raises:
            RunError: no batch arrived in time, or a group broke the staleness bound.
            TidemillError: the adoption of a version failed; raised as soon as it does.
        """
        self.position.unsynced = 0
        async with task_group() as tasks:
            self.syncs = WeightSync(self.fleet, self.generation, self.config.pause_mode, tasks)
            try:
                await self.fit_steps()
                if not self.stop.immediate:
                    await self.wait_for_evaluation()
            finally:
                await self.validation.cancel()
                self.syncs.cancel()

    async def fit_steps(self) -> None:
        while self.position.step < self.config.trainer.steps and self.stop.reason is None:
            timings = Timings()
            with timings.phase("step"):
                metrics = await self.fit_step(timings)
                if metrics is None:
                    break
                await self.evaluate_and_checkpoint(timings)
            self.position.seconds += timings.seconds["step"]
            metrics |= timings.metrics() | self.syncs.take() | await self.queue_and_rollout_metrics()
            metrics["throughput/tokens_per_second"] = metrics["response/trained_tokens"] / timings.seconds["step"]
            metrics["idle/trainer"] = timings.seconds["get_groups"] / timings.seconds["step"]
            self.observer.step_finished(self.position, metrics)
            timings.intervals += self.syncs.take_intervals()
            self.observer.active(self.position.step, timings, await self.generation.loads())
        if self.position.step < self.config.trainer.steps:
            what = f"the run is stopped ({self.stop.reason})" if self.stop.reason else "the data ended"
            self.observer.notice(f"{what} after step {self.position.step}")
        if self.position.unsynced and not self.stop.immediate:
            await self.wait_for_evaluation()
        await self.sync_weights()
        await self.wait_for_adoption()
        if report := self.syncs.take():
            self.observer.synced(self.position.step, report)

    async def fit_step(self, timings: Timings) -> Metrics | None:
        """One step; None if the data has ended, or a stop comes before a batch."""
        with timings.phase("get_groups"):
            lease = await self.unless_stopped(self.get_groups())
        if lease is None or not lease.deliveries:
            return None
        sampled = [Group.from_bytes(delivery.payload) for delivery in lease.deliveries]
        groups = self.without_stale(sampled)
        self.check_age(groups)
        with timings.phase("advantages"):
            advantages = self.advantages(groups)
        metrics = group_metrics(groups, self.position.version, rollout_means(groups, advantages))
        metrics["staleness/masked_tokens"] = trained_tokens(sampled) - metrics["response/trained_tokens"]
        metrics |= await self.update_actor(groups, advantages, timings)
        await self.queue.acknowledge(lease.lease_id)
        await self.generation.mark_trained([group.uid for group in groups])
        self.advance(groups)
        if self.sync_is_due:
            if self.validation.holds_sync:
                with timings.phase("evaluate"):
                    await self.wait_for_evaluation()
            with timings.phase("sync"):
                await self.sync_weights()
        return metrics

    def advantages(self, groups: Sequence[Group]) -> list[list[Float32Array]]:
        """`[R]` for each rollout of each group; every mini-batch by itself."""
        algorithm, weights = self.config.algorithm, self.config.reward_weights
        return [
            group
            for part in self.mini_batches(len(groups))
            for group in estimate(algorithm, groups[part], reward_weights=weights)
        ]

    def mini_batches(self, count: int) -> Iterator[slice]:
        size = self.config.trainer.ppo_mini_batch_size
        return (slice(start, start + size) for start in range(0, count, size))

    async def update_actor(
        self, groups: Sequence[Group], advantages: Sequence[Sequence[Float32Array]], timings: Timings
    ) -> Metrics:
        """One optimizer step with each mini-batch, in the order of the groups; returns the aggregated metrics."""
        config, reports = self.config, []
        for part in self.mini_batches(len(groups)):
            with timings.phase("pack"):
                rows = self.pack(groups[part], advantages[part])
                batches = micro_batches(rows, config.trainer.micro_batch_tokens, config.trainer.ranks)
            with timings.phase("update_actor"):
                aggregation = config.algorithm.aggregation
                denominator = step_denominator(groups[part], aggregation, config.rollout.max_new_tokens)
                reports.append(renamed(await self.ranks.update(batches, denominator, self.position.version)))
        return aggregate(reports)

    @property
    def sync_is_due(self) -> bool:
        """Every `trigger_parameter_sync_step` steps and after the last step, unless the stop is immediate."""
        last = self.position.step == self.config.trainer.steps
        due = last or self.position.unsynced >= self.config.asynchrony.trigger_parameter_sync_step
        return due and not self.stop.immediate

    async def unless_stopped(self, work: Coroutine[Any, Any, T], *, immediate: bool = False) -> T | None:
        """The result of `work`; None if a stop, or an immediate one, is asked for before; `work` is cancelled then."""
        waiting, asked = asyncio.create_task(work), asyncio.create_task(self.stop.asked(immediate=immediate))
        try:
            await asyncio.wait({waiting, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await waiting if waiting.done() else None
        finally:
            waiting.cancel()
            asked.cancel()
            await asyncio.gather(waiting, asked, return_exceptions=True)

    async def get_groups(self) -> Lease[Any]:
        """Lease a full batch; prompts of groups that the queue removes as stale are issued again.

        `idle/trainer` counts this wait. An adoption, for which generation itself waits, has its own deadline.
        """
        count, limit, adopting = self.config.required_samples, self.config.trainer.get_timeout_s, self.syncs.under_way
        try:
            async with asyncio.timeout(limit):
                while True:
                    lease = await self.queue.lease(count, self.position.version, limit)
                    if lease.swept:
                        await self.generation.reissue(lease.swept, "stale")
                    if lease.deliveries or lease.ended:
                        return lease
        except TimeoutError as error:
            if adopting:
                await self.syncs.settle()
                return await self.get_groups()
            state = {**await self.queue.stats(), **await self.generation.stats()}
            raise RunError(
                f"no batch of {count} groups within trainer.get_timeout_s = {limit} s. Raise it, or look for the cause "
                f"in the state of queue and rollouter: {state}"
            ) from error

    def without_stale(self, groups: Sequence[Group]) -> list[Group]:
        """With `staleness_strategy: mask`, mask tokens that are too old; other strategies deliver none."""
        asynchrony = self.config.asynchrony
        if asynchrony.staleness_strategy != "mask":
            return list(groups)
        return [mask_stale(group, self.position.version, asynchrony.max_staleness) for group in groups]

    def check_age(self, groups: Sequence[Group]) -> None:
        """The last guard of the staleness bound; admission and queue already enforce it."""
        bound = self.config.asynchrony.max_staleness
        for group in groups:
            age = group.age(self.position.version)
            if not 0 <= age <= bound:
                raise RunError(
                    f"group {group.uid} has age {age} at version {self.position.version}, allowed is 0..{bound}. "
                    "This is a bug in admission or queue; please report it."
                )

    def pack(self, groups: Sequence[Group], advantages: Sequence[Sequence[Float32Array]]) -> list[PackedRow]:
        """Rows of all groups, with each prompt once and without rollouts that have no gradient."""
        algorithm, limit = self.config.algorithm, self.config.trainer.micro_batch_tokens
        rows: list[PackedRow] = []
        first = 0
        for group, advantage in zip(groups, advantages, strict=True):
            rows += pack_group(
                group,
                advantage,
                limit,
                aggregation=algorithm.aggregation,
                keep_all=algorithm.needs_all_tokens,
                first=first,
            )
            first += len(group.rollouts)
        return rows

    def advance(self, groups: Sequence[Group]) -> None:
        position = self.position
        position.step += 1
        position.unsynced += 1
        position.groups += len(groups)
        position.response_tokens += trained_tokens(groups)
        position.max_age = max([position.max_age, *(group.age(position.version) for group in groups)])

    async def sync_weights(self) -> None:
        """Publish the updates since the last sync as the next version, which engines adopt during the next step.

        After an immediate stop the version is not published.
        """
        if self.position.unsynced and not self.stop.immediate:
            await self.unless_stopped(self.begin_version(), immediate=True)

    async def begin_version(self) -> None:
        await self.syncs.begin(self.position.version + 1)
        self.position.version, self.position.unsynced = self.position.version + 1, 0

    async def wait_for_adoption(self) -> None:
        await self.unless_stopped(self.syncs.settle(), immediate=True)

    async def wait_for_evaluation(self) -> None:
        await self.unless_stopped(self.validation.settle(), immediate=True)

    async def evaluate_and_checkpoint(self, timings: Timings) -> None:
        """Evaluate and checkpoint every `evaluation.every` and `checkpoint.every` versions."""
        if self.position.unsynced:
            return
        version, last = self.position.version, self.position.step == self.config.trainer.steps
        every = self.config.evaluation.every
        scored = every > 0 and version % every == 0 and not last
        if scored or last:
            with timings.phase("sync"):
                await self.wait_for_adoption()
        if scored:
            with timings.phase("evaluate"):
                await self.unless_stopped(self.validation.begin(self.position.step, version), immediate=True)
        if self.commit and not last and self.config.checkpoint.every and version % self.config.checkpoint.every == 0:
            with timings.phase("checkpoint"):
                # The checkpoint includes the time of this step so far.
                await self.commit(replace(self.position, seconds=self.position.seconds + timings.elapsed))

    async def queue_and_rollout_metrics(self) -> Metrics:
        queue, rollout = await asyncio.gather(self.queue.stats(), self.generation.stats())
        # Nothing is leased between two steps.
        metrics = {f"queue/{name}": value for name, value in queue.items() if name != "leased"}
        metrics |= {name if name.startswith("ledger/") else f"rollout/{name}": value for name, value in rollout.items()}
        metrics["idle/rollouter"] = metrics.pop("rollout/idle")
        return metrics


def trained_tokens(groups: Sequence[Group]) -> int:
    return sum(group.trained_tokens for group in groups)


def renamed(update: Mapping[str, float]) -> Metrics:
    """The report of an optimizer step under the metric names of `docs/metrics.md`."""
    names = {"loss": "loss/policy", "grad_norm": "loss/grad_norm", "lr": "loss/learning_rate"}
    report = {names.get(name, name if "/" in name else f"update/{name}"): value for name, value in update.items()}
    return {"update/count": 1.0, **report}
