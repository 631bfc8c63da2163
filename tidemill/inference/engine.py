"""A generation engine: vLLM's AsyncLLM behind `tidemill.protocols.Engine`.

What a weight update does to requests in flight, by pause mode:

keep: they stop between two decoding steps and continue with their tokens and their KV cache, which the old weights
    computed. (vLLM's `clear_cache=True` would preempt them and compute all KV again with the new weights: exact, and a
    prefill of everything in flight.) The prefix cache cannot be emptied while they hold blocks of it, so every request
    carries its version as cache salt, and a request without a token is submitted again: a prompt that is computed after
    the update never sees KV from before it, unless `sync.keep_prefix_cache` asks for that. A request that vLLM had
    preempted for want of KV memory is computed again where it is not cached any more.
abort: vLLM ends them; `generate` submits prompt and tokens so far again with the rest of the budget.
wait: requests with a token finish first, including those that vLLM preempts meanwhile; the others are submitted again
    afterwards.

A request that is submitted again keeps its priority: vLLM serves the group first that has waited longest.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import EngineCrashedError, EngineError, EngineLostError, SyncError, TidemillError
from tidemill.inference.engine_processes import cause_of_death, children, end_processes, resident_bytes
from tidemill.inference.engine_request import EngineRequest, Sample, prompt_log_probs, sampling_options, settled
from tidemill.inference.engine_settings import engine_environment, engine_settings
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, Float32Array, Int32Array
from tidemill.task_group import task_group

CONTROL_TIMEOUT_S = 60.0
ABORT_POLL_S = 0.01
DEATH_POLL_S = 0.25
# vLLM serves the smallest number first. Groups of one `Sampling.priority` are numbered as they come. The score that a
# publication waits for comes before all groups, because it would wait for the whole queue of the engine otherwise.
GROUPS = 1 << 40
SCORE_PRIORITY = -(1 << 62)
T = TypeVar("T")


class VllmEngine:
    """One vLLM replica; see `protocols.Engine` for its methods."""

    def __init__(
        self,
        model_path: str,
        rollout: RolloutConfig,
        max_prompt_tokens: int,
        seed: int,
        weight_transport: str,
        *,
        keep_prefix_cache: bool = False,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        self._model_path, self._rollout, self._seed, self._transport = model_path, rollout, seed, weight_transport
        self._keep_prefix_cache, self._control_timeout_s = keep_prefix_cache, control_timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._llm: Any = None
        self._context = 0
        self._max_sequences = 0
        self._version = 0
        self._generated = 0
        self._requests: dict[str, EngineRequest] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._updating = asyncio.Lock()
        self._children: list[Any] = []
        self._scores, self._arrivals = itertools.count(), itertools.count()

    async def start(self) -> None:
        """Load the model; its weights are version 0.

        Raises:
            EngineError: vLLM refuses the model or the settings, or is not ready within `rollout.start_timeout_s`.
        """
        before = set(children())
        try:
            async with asyncio.timeout(self._rollout.start_timeout_s):
                await asyncio.to_thread(self._load)
                self._watcher = asyncio.create_task(self._watch(self._llm))
                await self._while_alive(self._label_first_version(), "start")
            self._open.set()
        except TimeoutError as error:
            raise EngineError(
                f"the engine for {self._model_path} was not ready within rollout.start_timeout_s = "
                f"{self._rollout.start_timeout_s} s"
            ) from error
        except TidemillError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not start with {self._model_path}: {error}") from error
        finally:
            self._children = [child for child in children() if child not in before]
            if not self._open.is_set():
                await self.shutdown()

    def _load(self) -> None:
        os.environ.update(engine_environment(self._rollout))
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from tidemill.inference.weight_loader import BACKEND, WORKER_EXTENSION

        settings = engine_settings(
            self._model_path, self._rollout, self._max_prompt_tokens, current_platform.device_type
        )
        self._context, self._max_sequences = settings["max_model_len"], settings["max_num_seqs"]
        # A version from the object store is a file in memory when the engine loads it.
        backend = {"shared_memory": BACKEND, "object_store": BACKEND}[self._transport]
        settings |= {
            "weight_transfer_config": WeightTransferConfig(backend=backend),
            "worker_extension_cls": WORKER_EXTENSION,
        }
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=self._model_path, seed=self._seed, **settings))

    async def _label_first_version(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await self._llm.update_weight_version(str(self._version))

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        self._check_room(request_id, len(prompt_ids), sampling.max_tokens)
        if request_id in self._requests:
            raise EngineError(f"request {request_id} is in flight already")
        priority = sampling.priority * GROUPS + next(self._arrivals)
        samples = [Sample() for _ in range(sampling.n)]
        request = EngineRequest(request_id, prompt_ids.tolist(), sampling, priority, samples)
        self._requests[request_id] = request
        try:
            await self._while_alive(self._generate(request), f"request {request_id}")
        finally:
            del self._requests[request_id]
        self._generated += sum(len(sample.token_ids) for sample in samples)
        return [sample.completion() for sample in samples]

    async def _while_alive(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Run `work`; it fails when the engine ends, because vLLM would leave it waiting for ever."""
        caller, task = asyncio.current_task(), asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except (asyncio.CancelledError, Exception) as error:
            end = self._end(what)
            if end is None or (caller is not None and caller.cancelling()):
                raise
            raise end from error
        finally:
            self._tasks.discard(task)

    async def _watch(self, llm: Any) -> None:
        """Wait for the death of vLLM's core and cancel the calls that wait for its answer."""
        while not llm.errored:
            await asyncio.sleep(DEATH_POLL_S)
        for task in self._tasks:
            task.cancel()

    def _end(self, what: str) -> EngineLostError | None:
        """Why the engine answers no call any more; None while it lives."""
        if self._llm is None:
            return EngineLostError(f"{what}: the engine is not running")
        if self._llm.errored:
            ended = self._llm.engine_core.resources.engine_manager.finished_procs()
            return EngineCrashedError(f"{what}: the engine for {self._model_path} died: {cause_of_death(ended)}")
        return None

    async def _generate(self, request: EngineRequest) -> None:
        """Request all samples; vLLM shares the prompt's KV among them as among those of one request with n > 1."""
        async with task_group() as group:
            for index in range(request.sampling.n):
                group.create_task(self._sample(request, index))

    async def _sample(self, request: EngineRequest, index: int) -> None:
        """Submit a sample until it has ended; again only when an update has ended its request."""
        sample, stop = request.samples[index], request.sampling.stop
        kept = partial(settled, stop=stop, decode=self._decode) if stop else len
        while sample.reason == "abort":
            await self._open.wait()
            if request.aborted:
                return
            request_id = f"{request.request_id}/{index}"
            request.submitted.add(request_id)
            try:
                options = sampling_options(request.sampling, index, len(sample.token_ids))
                output = await self._run(request_id, request.prompt + sample.token_ids, options, request.priority)
            finally:
                request.submitted.discard(request_id)
            sample.extend(output.outputs[0], kept)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        return text

    async def _run(self, request_id: str, token_ids: list[int], options: Mapping[str, Any], priority: int) -> Any:
        """Submit to vLLM and wait for the one output; errors of vLLM become an `EngineError`."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMError
        from vllm.sampling_params import RequestOutputKind

        salt = {} if self._keep_prefix_cache else {"cache_salt": str(self._version)}
        prompt = {"prompt_token_ids": token_ids, **salt}
        try:
            # Streaming with n > 1 would return in the end only the samples that ended last.
            parameters = SamplingParams(**options, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
            outputs = [output async for output in self._llm.generate(prompt, parameters, request_id, priority=priority)]
        except (VLLMError, ValueError) as error:
            raise EngineError(
                f"request {request_id} of {len(token_ids)} tokens failed: {error.__cause__ or error!r}"
            ) from error
        if len(outputs) != 1:
            raise EngineError(
                f"request {request_id} of {len(token_ids)} tokens ended with {len(outputs)} outputs, not 1"
            )
        return outputs[0]

    def _check_room(self, request_id: str, prompt: int, response: int) -> None:
        self._running(f"request {request_id}")
        if prompt + response > self._context:
            raise EngineError(
                f"request {request_id}: {prompt} prompt tokens and {response} new ones exceed the engine's context of "
                f"{self._context} tokens; it comes from data.max_prompt_tokens + rollout.max_new_tokens"
            )

    def _running(self, what: str) -> Any:
        end = self._end(what)
        if end is not None:
            raise EngineLostError(str(end))  # not EngineCrashedError: the engine died before this call
        return self._llm

    async def abort(self, request_ids: Sequence[str]) -> None:
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        for request in requests:
            request.aborted = True
        async with self._control("abort requests"):
            # Repeated, because vLLM does not know a request yet that is on its way there.
            while pending := [request_id for request in requests for request_id in request.submitted]:
                await self._running("abort").abort(pending)
                await asyncio.sleep(ABORT_POLL_S)

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        """Load a version, see `protocols.Engine.update_weights`; concurrent updates take turns.

        The deadline is `rollout.start_timeout_s`, plus `group_timeout_s` where requests finish first. An engine that
        may hold tensors of two versions samples nothing any more.

        Raises:
            SyncError: the weights did not arrive whole.
            EngineLostError: the engine died, or did not answer in time.
        """
        limit = self._rollout.start_timeout_s + (self._rollout.group_timeout_s if mode == "wait" else 0.0)
        what = f"update to version {update.version}"
        async with self._updating:
            await self._while_alive(self._update(self._running(what), update, mode, limit), what)

    async def _update(self, llm: Any, update: WeightUpdate, mode: PauseMode, limit: float) -> None:
        # Requests that arrive meanwhile wait here, not in vLLM: their cache salt must be that of the new version.
        self._open.clear()
        resumable = True
        try:
            async with asyncio.timeout(limit):
                if mode == "wait":
                    await self._drain(llm)
                await llm.pause_generation(mode=mode, clear_cache=mode != "keep" and not self._keep_prefix_cache)
                if mode == "keep" and not self._keep_prefix_cache:
                    await self._take_back(llm)
                await self._load_weights(llm, update)
        except TimeoutError as error:
            resumable = False
            raise EngineLostError(f"the engine did not load version {update.version} within {limit:g} s") from error
        except Exception as error:
            resumable = False  # also where the workers do not answer
            resumable = await self._holds_old_version(llm)
            fate = "" if resumable else "; the engine may hold tensors of two versions and generates no more"
            raise SyncError(f"the engine could not load version {update.version}: {error}{fate}") from error
        finally:
            if resumable and self._end("resume") is None:
                async with self._control("resume"):
                    await llm.resume_generation()
                self._open.set()

    async def _holds_old_version(self, llm: Any) -> bool:
        """Whether all workers hold the version from before the update that failed."""
        if self._end("status") is not None:
            return False
        async with self._control("tell the version of its weights"):
            versions = await llm.collective_rpc("loaded_version")
        return all(version == self._version for version in versions)

    async def _drain(self, llm: Any) -> None:
        """Let requests with a token finish; in a pause vLLM would not continue those that it preempted."""
        await self._take_back(llm)
        while self._submitted():
            await asyncio.sleep(ABORT_POLL_S)

    async def _take_back(self, llm: Any) -> None:
        """End the requests without a token; they are submitted again with the cache salt of the new version."""
        while waiting := [name for name in self._submitted() if not has_token(llm.output_processor, name)]:
            await llm.abort(waiting)
            await asyncio.sleep(ABORT_POLL_S)

    def _submitted(self) -> list[str]:
        return [request_id for request in self._requests.values() for request_id in request.submitted]

    async def _load_weights(self, llm: Any, update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=asdict(update)))
        await llm.finish_weight_update(weight_version=str(update.version))
        self._version = update.version

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Prompt log-probs make vLLM compute the whole sequence."""
        request_id = f"score-{next(self._scores)}"
        self._check_room(request_id, len(token_ids), 1)
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}

        async def work() -> Float32Array:
            await self._open.wait()
            output = await self._run(request_id, token_ids.tolist(), options, SCORE_PRIORITY)
            return prompt_log_probs(output.prompt_logprobs)

        return await self._while_alive(work(), request_id)

    async def version(self) -> int:
        self._running("version")
        return self._version

    async def stats(self) -> Mapping[str, float]:
        """Samples beyond `max_num_seqs` wait."""
        samples = sum(len(request.samples) for request in self._requests.values())
        return {
            "running": float(min(samples, self._max_sequences)),
            "waiting": float(max(0, samples - self._max_sequences)),
            "generated_tokens": float(self._generated),
            "rss_bytes": float(resident_bytes()),
        }

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        self._open.clear()
        for task in (*self._tasks, *filter(None, [self._watcher])):
            task.cancel()
        if llm is not None:
            if llm.output_handler is not None:
                # The handler would take this shutdown for the death of the core, and log an error.
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler])
            await asyncio.to_thread(llm.shutdown, self._control_timeout_s)
            # vLLM closes its sockets but not their context.
            await asyncio.to_thread(llm.engine_core.resources.ctx.destroy, 0)
            # AsyncLLM shuts down again when it is collected; at the interpreter's exit that fails with a traceback.
            del llm
            gc.collect()
        await asyncio.to_thread(end_processes, self._children)

    @asynccontextmanager
    async def _control(self, what: str) -> AsyncIterator[None]:
        from vllm.exceptions import VLLMError

        limit = self._control_timeout_s
        try:
            async with asyncio.timeout(limit):
                yield
        except VLLMError as error:
            raise EngineError(f"the engine could not {what}: {error}") from error
        except TimeoutError as error:
            raise EngineLostError(f"the engine did not {what} within {limit:g} s") from error


def has_token(output_processor: Any, request_id: str) -> bool:
    """Whether a request has an output; False if vLLM does not know it."""
    numbers = output_processor.external_req_ids.get(request_id, ())
    return any(not output_processor.request_states[number].is_prefilling for number in numbers)
