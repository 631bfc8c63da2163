"""Engines in processes of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from tidemill.actors.call import CONTROL_TIMEOUT_S, MAX_CALLS, call
from tidemill.actors.placement import Place, engine_place
from tidemill.cluster.local import weights_folder
from tidemill.config.run import RunConfig
from tidemill.errors import EngineError, EngineLostError, TidemillError
from tidemill.models.locate import fetch_model_once
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, Float32Array, Int32Array
from tidemill.store.server import open_store
from tidemill.weights.receiver import Receiver

ORDERLY_END_S = 30.0
T = TypeVar("T")
LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tidemill.inference.engine import VllmEngine


class EngineActor:
    """A vLLM engine in a process of its own.

    Args:
        config: of the run.
        model_path: folder of the model; None has it brought to this pod, see `models.locate.fetch_model_once`.
        index: of the engine.
    """

    engine: VllmEngine | None = None

    def __init__(self, config: RunConfig, model_path: str | None, index: int) -> None:
        self.config, self.model_path, self.index = config, model_path, index
        self.receiver = make_receiver(config) if config.sync.transport == "object_store" else None

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

    def started(self) -> VllmEngine:
        """The engine, once there is one.

        Raises:
            EngineError: there is none yet.
        """
        if self.engine is None:
            raise EngineError("the engine is not started")
        return self.engine

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        """See `Engine`."""
        return await self.started().generate(request_id, prompt_ids, sampling)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine`."""
        return await self.started().score(token_ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        await self.started().abort(request_ids)

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """See `Engine`; generation goes on while the weights are fetched."""
        async with self.fetched(update) as local:
            await self.started().update_weights(local, mode)

    @asynccontextmanager
    async def fetched(self, update: WeightUpdate) -> AsyncIterator[WeightUpdate]:
        """The update as a file of this host."""
        if self.receiver is None:
            yield update
            return
        async with self.receiver.local(update) as local:
            yield local

    async def version(self) -> int:
        """See `Engine`."""
        return await self.started().version()

    async def stats(self) -> Mapping[str, float]:
        """See `Engine`."""
        return await self.started().stats()

    async def shutdown(self) -> None:
        """See `Engine`."""
        if self.engine is not None:
            await self.engine.shutdown()
        if self.receiver is not None:
            self.receiver.close()


def make_receiver(config: RunConfig) -> Receiver:
    """The receiving end of the object store; engines of one host share what they fetch."""
    return Receiver(
        weights_folder(config) / "received",
        lambda: open_store(config.store, config.output),
        config.sync.timeout_s,
    )


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine in another process: `rollout.fleet.Member`."""

    name: str
    actor: Any

    async def start(self) -> None:
        """Wait until the engine has its place and has loaded its model; the caller has the deadline."""
        await self._answer(self.actor.start.remote(), None)

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        """See `Engine`. Cancelling the call aborts the request, so deadlines are the caller's."""
        try:
            return await self._answer(self.actor.generate.remote(request_id, prompt_ids, sampling), None)
        except asyncio.CancelledError:
            self.actor.abort.remote([request_id])
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine`."""
        await self._answer(self.actor.abort.remote(list(request_ids)))

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """See `Engine`; the synchronizer has the deadline, as for `score`."""
        await self._answer(self.actor.update_weights.remote(update, mode), None)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine`."""
        return await self._answer(self.actor.score.remote(token_ids), None)

    async def version(self) -> int:
        """See `Engine`."""
        return await self._answer(self.actor.version.remote())

    async def stats(self) -> Mapping[str, float]:
        """See `Engine`."""
        return await self._answer(self.actor.stats.remote())

    async def shutdown(self) -> None:
        """See `Engine`."""
        await self._answer(self.actor.shutdown.remote())

    async def end(self) -> None:
        """End the process, in order where it still answers."""
        try:
            async with asyncio.timeout(ORDERLY_END_S):
                await self.shutdown()
        except (TidemillError, TimeoutError) as error:
            LOG.warning("%s did not end by itself: %r", self.name, error)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process at once, also one that has no place yet."""
        ray.kill(self.actor)

    async def _answer(self, reference: Awaitable[T], timeout_s: float | None = CONTROL_TIMEOUT_S) -> T:
        return await call(self.name, reference, timeout_s, lost=EngineLostError)


def start_engine(config: RunConfig, model_path: str | None, index: int) -> RemoteEngine:
    """Place one engine; its model loads when `start` of the actor is called."""
    from tidemill.inference.engine import engine_environment

    place = engine_place(config)
    environment = engine_environment(config.rollout, place.gpus)
    if model_path is None:
        del environment["HF_HUB_OFFLINE"]  # the actor goes online for the model, and offline again when it loads it
    actor = engine_shell(EngineActor, place, environment).remote(config, model_path, index)
    return RemoteEngine(f"engine {index}", actor)


def engine_shell(actor: type[EngineActor], place: Place, environment: Mapping[str, str]) -> Any:
    """The Ray class of an engine, with so many open calls that control calls pass any crowd of generations."""
    return ray.remote(actor).options(max_concurrency=MAX_CALLS, **place.options(environment))
