"""One training run, from start to checkpoint: wires the actors, supervises them, and keeps the schedule.

    prompts ─► Rollouter ─► MessageQueue ─► Trainer ─► Synchronizer ─► engines
                  ▲                            │
                  └──── ledger ◄───────────────┴─► checkpoint, metrics, model

The driver process holds the schedule and nothing heavy: engines, rollouter, queue and trainer ranks are Ray actors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tidemill.actors.engine import start_engine
from tidemill.actors.placement import (
    check_gpus,
    check_hosts,
    engine_placement,
    has_own_pods,
    service_placement,
    wait_for_pods,
)
from tidemill.actors.queue import RemoteQueue, start_queue
from tidemill.actors.ranks import RemoteRanks, start_ranks
from tidemill.actors.rollouter import RemoteRollouter, start_rollouter
from tidemill.cluster.local import cluster_hosts, cluster_resources, ray_session, weights_folder
from tidemill.config.run import RunConfig
from tidemill.config.validation import notices, other_processor
from tidemill.driver.observer import RunObserver
from tidemill.driver.resume import Restart, find_restart, identity
from tidemill.errors import RunError, TidemillError
from tidemill.models.locate import LocalModel, fetch_model
from tidemill.observe.events import EventLog, PhaseStarted
from tidemill.observe.meters import MemoryMeter, Timings
from tidemill.observe.report import Sample, Summary, shortened
from tidemill.observe.text import counted
from tidemill.protocols import Evaluation
from tidemill.records import EngineId
from tidemill.rollout.elasticity import Elasticity
from tidemill.rollout.fleet import Fleet, FleetLimits
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.lease import Claim, Fence
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import open_store
from tidemill.task_group import task_group
from tidemill.tracking.tracker import Tracker
from tidemill.train.stop import Stop
from tidemill.train.trainer import Position, Trainer
from tidemill.weights.manifest import weights_prefix
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import ObjectStoreTransport, SharedMemoryTransport, Transport

CLOSE_TIMEOUT_S = 90.0
PLACE_TIMEOUT_S = 60.0  # for Ray to place the actors, on top of their start
UPLOAD_TIMEOUT_S = 3600.0
SHOWN_SAMPLES = 5
LOG = logging.getLogger(__name__)
# Phases of a step, under their names in the summary; they do not overlap. `evaluate` is a step of the pipeline there.
PHASES = {
    "get_groups": "get_groups",
    "update_actor": "update_actor",
    "sync": "sync",
    "evaluate": "held_out",
    "checkpoint": "checkpoint",
}


def train(
    config: RunConfig, stop: Stop | None = None, claim: Claim | None = None, *, score_last: bool = False
) -> Summary:
    """Run or resume the training that `config` describes.

    Args:
        config: of the run.
        stop: ends it early, with a checkpoint and an exported model.
        claim: to the run's lease, which is required to write to the store; None writes without a lease.
        score_last: score the last version on the held-out prompts too; in a pipeline a later step scores the model.

    Raises:
        TidemillError: a part of the run failed; the traceback of its worker is the cause.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    model = None if has_own_pods(config) else fetch_model(config)
    with EventLog(config.folder / "events.jsonl") as log:
        log.write(PhaseStarted("start Ray and open the MLflow run"))
        with ray_session(config):
            return asyncio.run(Run(config, model, log, stop or Stop(), claim, score_last).train())


@dataclass(slots=True)
class Parts:
    """The actors of a run."""

    fleet: Fleet
    ranks: RemoteRanks
    queue: RemoteQueue
    generation: RemoteRollouter
    synchronizer: Synchronizer

    async def close(self) -> None:
        """Stop generation and free the engines; Ray ends the processes after that."""
        try:
            await attempt("stopping the generation", self.generation.stop())
            await attempt("ending the reward workers", self.generation.close())
            await asyncio.gather(*(attempt(f"ending {member.id}", member.end()) for member in self.fleet.members))
        finally:
            self.synchronizer.close()


async def attempt(what: str, work: Awaitable[None]) -> None:
    """Await one step of the clean-up; a failure is logged, because it must not hide why the run ends."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await work
    except (TidemillError, TimeoutError) as error:
        LOG.warning("%s failed: %r", what, error)


@dataclass(slots=True)
class Run:
    """The schedule of one attempt at a run.

    Attributes:
        model: None if every pod downloads the model itself.
        upload: of a checkpoint, while it is under way.
    """

    config: RunConfig
    model: LocalModel | None
    log: EventLog
    stop: Stop
    claim: Claim | None = None
    score_last: bool = False
    upload_timeout_s: float = UPLOAD_TIMEOUT_S
    checkpoint_uri: str | None = None
    upload: asyncio.Task[str] | None = None
    ledger: Mapping[str, Any] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)

    async def train(self) -> Summary:
        """Start the parts, train, commit, export; the parts are always freed."""
        started = time.monotonic()
        with open_store(self.config.store, self.config.output) as store, MemoryMeter() as memory:
            restart = find_restart(self.config, Checkpoints(store, self.config.name, self.config.checkpoint.keep))
            tracker = Tracker.start(self.config, restart.mlflow_run_id if restart else None)
            observer = RunObserver(self.config, self.log, tracker)
            try:
                with self.timings.phase("load"):
                    parts = await self.start_parts(observer, restart, store)
                try:
                    async with parts.fleet.kept():
                        before = await self.begin(parts, observer, restart)
                        trainer = self.make_trainer(parts, observer, restart, before)
                        await self.learn(trainer, parts, observer)
                    with self.timings.phase("export"):
                        model_uri = await self.finish(trainer, parts, observer)
                    after = await self.evaluate_last(trainer.position, parts, observer)
                finally:
                    await self.close(parts)
            except BaseException as error:
                tracker.fail(error)
                raise
            tracker.finish("FINISHED")
        return self.summarise(trainer, observer, before, model_uri, memory, time.monotonic() - started).scored(after)

    async def start_parts(self, observer: RunObserver, restart: Restart | None, store: ObjectStore) -> Parts:
        """Place all actors; engines, trainer and rollouter load at the same time."""
        config, path = self.config, str(self.model.path) if self.model else None
        await wait_for_pods(config, observer.phase)
        source = self.model.source if self.model else "downloaded by each pod"
        engines_of_run = counted(config.rollout.engines, "engine")
        observer.phase(f"load {config.model} ({source}) into {engines_of_run} and the trainer")
        check_gpus(config)
        check_hosts(config, cluster_hosts())
        gpus = engine_placement(config).gpus > 0
        for text in (*notices(config), *other_processor(config.rollout, gpus)):
            observer.notice(text)
        engines = [start_engine(config, path, EngineId(n)) for n in range(config.rollout.engines)]
        ranks = start_ranks(config, path, self.claim)
        asynchrony, capacity = config.asynchrony, config.queue_capacity
        queue = start_queue(capacity, asynchrony.max_staleness, config.queue.when_full, service_placement(config))
        version = restart.position.version if restart else 0
        generation = start_rollouter(config, path, engines, queue, restart.ledger if restart else None, version)
        await loaded(config, [ranks.load(), generation.start(), *(engine.start() for engine in engines)])
        if restart:
            observer.phase(f"resume from version {version}")
            await ranks.restore(version)
        canary = await generation.canary()
        transport = make_transport(config, ranks, store, self.claim)
        synchronizer = Synchronizer(config.publication, transport, ranks, canary)
        fleet = Fleet(
            engines,
            partial(start_engine, config, path),
            FleetLimits(config.rollout.start_timeout_s + PLACE_TIMEOUT_S, config.rollout.group_timeout_s),
            generation,
            synchronizer,
            observer.notice,
            elasticity(config),
        )
        observer.listeners.append(fleet.measured)
        return Parts(fleet, ranks, queue, generation, synchronizer)

    async def begin(self, parts: Parts, observer: RunObserver, restart: Restart | None) -> Evaluation | None:
        """Bring the trainer's weights to the engines and score the policy that training starts from."""
        version = restart.position.version if restart else 0
        report = dict(await parts.fleet.publish(version, "keep"))
        if restart is None:
            observer.synced(0, report)
        if restart or self.config.data.held_out is None:
            return restart.held_out_before if restart else None
        observer.phase("score the held-out prompts before training")
        before = await parts.generation.evaluate(0)
        observer.evaluated(0, before)
        return before

    def make_trainer(
        self, parts: Parts, observer: RunObserver, restart: Restart | None, before: Evaluation | None
    ) -> Trainer:
        """Make the trainer, whose commit uploads while training goes on."""

        async def commit(position: Position) -> None:
            await self.settle()
            self.ledger = await parts.generation.ledger_state()
            run_id = observer.tracker.run_id
            state = Restart(position, self.ledger, run_id, identity(self.config), before).to_state()
            await parts.ranks.snapshot()
            self.upload = asyncio.create_task(parts.ranks.upload(position.version, state))

        return Trainer(
            self.config,
            parts.queue,
            parts.generation,
            parts.ranks,
            parts.fleet,
            observer,
            commit=commit,
            position=replace(restart.position, restarts=restart.position.restarts + 1) if restart else Position(),
            stop=self.stop,
        )

    async def learn(self, trainer: Trainer, parts: Parts, observer: RunObserver) -> None:
        """Generate and train at the same time until the trainer is done; a failure of either ends both."""
        observer.phase(f"train {counted(self.config.trainer.steps, 'step')}")
        async with task_group() as tasks:
            tasks.create_task(parts.generation.run())
            await trainer.fit()
            await parts.generation.stop()

    async def finish(self, trainer: Trainer, parts: Parts, observer: RunObserver) -> str | None:
        """Commit the last version and, unless the stop is immediate, export the model; returns the model's URI.

        The model is exported while the checkpoint uploads.
        """
        observer.phase("store the checkpoint and the exported model")
        assert trainer.commit is not None
        await trainer.commit(trainer.position)
        publish = parts.ranks.publish_model
        export = None if self.stop.immediate else asyncio.create_task(publish(trainer.position.version))
        try:
            await self.settle()
            observer.picture()
            return None if export is None else await export
        finally:
            if export is not None:
                export.cancel()  # has no effect on one that is done

    async def evaluate_last(self, position: Position, parts: Parts, observer: RunObserver) -> Evaluation | None:
        """Score the last version if `score_last` is set; after an immediate stop the engines may not have it."""
        if not self.score_last or self.stop.immediate or self.config.data.held_out is None:
            return None
        observer.phase("score the held-out prompts after training")
        with self.timings.phase("evaluate"):
            after = await parts.generation.evaluate(position.version)
        observer.evaluated(position.step, after)
        return after

    async def close(self, parts: Parts) -> None:
        """Free the parts. A checkpoint under way is stored first, so that the next attempt repeats less."""
        self.log.write(PhaseStarted("end the engines and the trainer"))
        try:
            await attempt("storing the checkpoint under way", self.settle())
        finally:
            await parts.close()

    async def settle(self) -> None:
        """Wait for the upload under way; its failure fails the run.

        Raises:
            RunError: it takes longer than `upload_timeout_s`.
            StoreError: it failed.
        """
        upload, self.upload = self.upload, None  # reported once, also when its failure closes the run
        if upload is None:
            return
        try:
            async with asyncio.timeout(self.upload_timeout_s):
                self.checkpoint_uri = await upload
        except TimeoutError as error:
            raise RunError(
                f"a checkpoint was not stored within {self.upload_timeout_s:g} s; is the store slow?"
            ) from error

    def summarise(
        self,
        trainer: Trainer,
        observer: RunObserver,
        before: Evaluation | None,
        model_uri: str | None,
        memory: MemoryMeter,
        total_seconds: float,
    ) -> Summary:
        """The summary for the run's folder and the next steps of the pipeline."""
        position, metrics = trainer.position, observer.steps.result()
        return Summary(
            steps=position.step,
            held_out_before=before.score if before else None,
            held_out_after=None,
            train_seconds=position.seconds,
            total_seconds=total_seconds,
            tokens_per_second=position.response_tokens / max(position.seconds, 1e-9),
            trainer_idle=metrics.get("idle/trainer"),
            rollouter_idle=metrics.get("idle/rollouter"),
            max_age=position.max_age if position.groups else None,
            peak_memory_bytes=peak_memory(self.config, memory),
            checkpoint_uri=self.checkpoint_uri,
            model_uri=model_uri,
            model_version=None,
            mlflow_run_id=observer.tracker.run_id,
            samples=samples(before),
            skipped=dict(Counter(dict(self.ledger.get("quarantined", {})).values())),
            dropped=dict(self.ledger.get("dropped", {})),
            phase_seconds=self.timings.seconds
            | {label: metrics[f"time/{name}"] for name, label in PHASES.items() if f"time/{name}" in metrics},
            metrics=metrics,
            stopped=self.stop.reason if position.step < self.config.trainer.steps else None,
            restarts=position.restarts,
        )


def peak_memory(config: RunConfig, memory: MemoryMeter) -> int | None:
    """Bytes of all processes; None if another process started Ray, because the meter sees only child processes."""
    return memory.peak_bytes if config.cluster.provider == "local" else None


def elasticity(config: RunConfig) -> Elasticity | None:
    """The rule for the number of engines; None where `kubernetes.max_engines` keeps it fixed."""
    smallest, largest = config.rollout.engines, config.kubernetes.max_engines
    return Elasticity(smallest, largest) if largest is not None and largest > smallest else None


def make_transport(config: RunConfig, ranks: RemoteRanks, store: ObjectStore, claim: Claim | None) -> Transport:
    """The transport of `sync.transport`."""
    if config.sync.transport == "object_store":
        fence = Fence(store, config.name, claim) if claim else None
        return ObjectStoreTransport(ranks, store, weights_prefix(config.name), fence)
    return SharedMemoryTransport(weights_folder(config), ranks)


async def loaded(config: RunConfig, parts: Sequence[Awaitable[None]], place_timeout_s: float = PLACE_TIMEOUT_S) -> None:
    """Wait until all of `parts` have loaded.

    Raises:
        RunError: not within `rollout.start_timeout_s`, for example because the cluster has no room for an actor.
    """
    limit = config.rollout.start_timeout_s + place_timeout_s
    try:
        async with asyncio.timeout(limit):
            await asyncio.gather(*parts)
    except TimeoutError as error:
        raise RunError(
            f"engines, trainer and rollouter were not ready within {limit:g} s (rollout.start_timeout_s = "
            f"{config.rollout.start_timeout_s:g} and time to place them); the cluster has {cluster_resources()}"
        ) from error


def samples(before: Evaluation | None) -> tuple[Sample, ...]:
    """A few held-out prompts with the answers of the first policy."""
    if before is None:
        return ()
    shown = (shortened(answer) for answer in before.answers[:SHOWN_SAMPLES])
    return tuple(Sample(answer.prompt, answer.response, None, answer.expected) for answer in shown)
