"""Engines in processes of their own: those of a run, and the one that scores the exported model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ray

from tidemill.actors.call import MAX_CALLS, Remote, call, delegate, forward
from tidemill.actors.placement import Placement, engine_placement
from tidemill.cluster.local import weights_folder
from tidemill.config.run import RunConfig
from tidemill.errors import EngineError, EngineLostError, TidemillError
from tidemill.inference.engine_settings import engine_environment
from tidemill.models.locate import Locator, fetch_model_once
from tidemill.protocols import Engine, Evaluation, PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, EngineId, Int32Array
from tidemill.store.server import open_store
from tidemill.weights.download import WeightDownloader

END_TIMEOUT_S = 30.0  # for an engine to free its resources; then its process is killed
SCORER = "the engine that scores the exported model"
LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tidemill.inference.engine import VllmEngine


@delegate(Engine)
class EngineActor:
    """A vLLM engine in a process of its own.

    Args:
        config: of the run.
        model_path: folder of the model; None downloads it to this pod, see `models.locate.fetch_model_once`.
        index: of the engine.
    """

    engine: VllmEngine | None = None

    def __init__(self, config: RunConfig, model_path: str | None, index: int) -> None:
        self.config, self.model_path, self.index = config, model_path, index
        self.downloader: WeightDownloader | None = None
        if config.sync.transport == "object_store":
            folder = weights_folder(config) / "received"  # engines of one host share what they download
            self.downloader = WeightDownloader(
                folder, lambda: open_store(config.store, config.output), config.sync.timeout_s
            )

    async def start(self) -> None:
        """Load the model; returns when the first request can come."""
        from tidemill.inference.engine import VllmEngine

        config = self.config
        path = self.model_path or str((await asyncio.to_thread(fetch_model_once, config)).path)
        self.engine = VllmEngine(
            path,
            config.rollout,
            config.data.max_prompt_tokens,
            config.seed + self.index,
            config.sync.transport,
            keep_prefix_cache=config.sync.keep_prefix_cache,
        )
        await self.engine.start()

    def target(self) -> VllmEngine:
        if self.engine is None:
            raise EngineError("the engine is not started")
        return self.engine

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        if self.downloader is None:
            await self.target().update_weights(update, mode)
            return
        async with self.downloader.local(update) as local:
            await self.target().update_weights(local, mode)

    async def shutdown(self) -> None:
        if self.engine is not None:
            await self.engine.shutdown()
        if self.downloader is not None:
            self.downloader.close()


@dataclass(frozen=True, slots=True)
class RemoteEngine(Remote):
    """An engine in another process: `rollout.fleet.Member`."""

    id: EngineId
    actor: Any
    end_timeout_s: float = END_TIMEOUT_S
    lost = EngineLostError

    start = forward(EngineActor.start, timeout_s=None)
    abort = forward(Engine.abort)
    update_weights = forward(Engine.update_weights, timeout_s=None)
    score = forward(Engine.score, timeout_s=None)
    version = forward(Engine.version)
    stats = forward(Engine.stats)
    shutdown = forward(Engine.shutdown)

    @property
    def name(self) -> str:
        return str(self.id)

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        """Sample; cancelling the call aborts the request, so the caller has the deadline."""
        try:
            return await self.answer(self.actor.generate.remote(request_id, prompt_ids, sampling), None)
        except asyncio.CancelledError:
            self.actor.abort.remote([request_id])
            raise

    async def end(self) -> None:
        try:
            async with asyncio.timeout(self.end_timeout_s):
                await self.shutdown()
        except (TidemillError, TimeoutError) as error:
            LOG.warning("%s did not end by itself: %r", self.id, error)
        finally:
            self.kill()

    def kill(self) -> None:
        ray.kill(self.actor)


def start_engine(config: RunConfig, model_path: str | None, engine_id: EngineId) -> RemoteEngine:
    """Place one engine; its model loads when `start` of the actor is called."""
    placement = engine_placement(config)
    environment = engine_environment(config.rollout, placement.gpus)
    if model_path is None:
        del environment["HF_HUB_OFFLINE"]  # the actor goes online for the model, and offline again when it loads it
    actor = engine_shell(EngineActor, placement, environment).remote(config, model_path, engine_id.number)
    return RemoteEngine(engine_id, actor)


def engine_shell(actor: type[EngineActor], placement: Placement, environment: Mapping[str, str]) -> Any:
    """The Ray class of an engine, with so many open calls that control calls pass any crowd of generations."""
    return ray.remote(actor).options(max_concurrency=MAX_CALLS, **placement.options(environment))


class ScorerActor:
    """Scores one model in a pod of an engine: the pod of the driver may have no GPU and little memory."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    async def ready(self) -> None:
        """Answers once the actor is placed."""

    async def score(self, model: str) -> Evaluation:
        from tidemill.rollout.offline import evaluate_model

        with TemporaryDirectory(prefix="tidemill-model-") as folder:
            return await evaluate_model(self.config, Locator.of(self.config).fetch_model(model, Path(folder)).path)


async def score_remotely(config: RunConfig, model: str) -> Evaluation:
    """Greedy answers of a model in the store to `data.held_out`, from a new engine in place of an earlier one."""
    placement = engine_placement(config)
    options = placement.options(engine_environment(config.rollout, placement.gpus))
    actor = ray.remote(ScorerActor).options(**options).remote(config)
    await call(SCORER, actor.ready.remote(), config.kubernetes.start_timeout_s)
    return await call(SCORER, actor.score.remote(model), None)  # the engine has deadlines of its own
