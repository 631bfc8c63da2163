"""RewardPool: reward functions in worker processes, under a deadline.

A reward may loop for ever, crash the interpreter or hold the interpreter lock for minutes; none of that may disturb
generation. So every call runs in a worker process, which is killed and replaced when the call takes too long, together
with every process that the worker has started.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tidemill.config.data import RewardConfig, reward_names
from tidemill.errors import RewardError, RewardTimeoutError
from tidemill.records import Int32Array, Prompt
from tidemill.rollout import rewards as worker
from tidemill.rollout.rewards import Response
from tidemill.rollout.worker_process import WorkerContext

START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 30.0

Score = tuple[float, dict[str, float]]


class RewardPool:
    """Scores groups with a weighted sum of reward functions.

    `timeout_s` of a function bounds one call, which scores all responses of one group. The time counts from the moment
    a worker takes the call, without the start of a worker or the wait for a free one.

    Args:
        rewards: the functions; each value is reported under the function's name without the module, the second one of
            the same name as `name-2`.
        workers: number of processes.
        search_path: folders where workers look for modules after all others; None is the working directory.
    """

    def __init__(
        self, rewards: Sequence[RewardConfig], workers: int = 1, search_path: Sequence[str] | None = None
    ) -> None:
        self._rewards = list(zip(reward_names(rewards), rewards, strict=True))
        self._functions = [reward.function for reward in rewards]
        self._workers = workers
        self._search_path = [os.getcwd()] if search_path is None else list(search_path)
        self._pool = self._new_pool()
        self._closed = False

    async def start(self) -> None:
        """Start the workers and resolve every function.

        Raises:
            RewardError: a function cannot be imported, or the workers do not start.
        """
        future = asyncio.wrap_future(self._active().schedule(worker.import_error, args=(self._functions,)))
        try:
            message = await asyncio.wait_for(future, START_TIMEOUT_S)
        except TimeoutError as error:
            raise RewardError(
                f"reward workers did not start within {START_TIMEOUT_S:g} s; check whether the module of one of "
                f"{self._functions} blocks at import"
            ) from error
        except (BrokenProcessPool, ProcessExpired) as error:
            raise RewardError(f"a reward worker died while it imported {self._functions}: {error}") from error
        if message is not None:
            raise RewardError(message)

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Total and parts for every response, in order. Cancelling the call kills the workers that run it.

        Raises:
            RewardTimeoutError: a function took longer than its `timeout_s`.
            RewardError: a function raised (the message has its traceback), returned a wrong type, or killed its
                worker.
        """
        calls = [self._call(label, reward, prompt, responses) for label, reward in self._rewards]
        per_function = await asyncio.gather(*calls)
        return [self._weighted_sum(parts) for parts in zip(*per_function, strict=True)]

    async def close(self) -> None:
        """Stop the workers, also those that are busy.

        Raises:
            RewardError: they still run after `CLOSE_TIMEOUT_S`.
        """
        self._closed = True
        self._pool.stop()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._pool.join), CLOSE_TIMEOUT_S)
        except TimeoutError as error:
            raise RewardError(f"reward workers did not stop within {CLOSE_TIMEOUT_S:g} s") from error

    async def _call(
        self, label: str, reward: RewardConfig, prompt: Prompt, responses: Sequence[Response]
    ) -> list[dict[str, float]]:
        texts = [response.within(reward.template) for response in responses]
        call = (reward.function, label, reward.arguments, columns_of(prompt), texts)
        future = self._active().schedule(worker.apply, args=call, timeout=reward.timeout_s)
        try:
            parts: list[dict[str, float]] | str = await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise RewardTimeoutError(
                f"reward {reward.function!r} timed out: more than {reward.timeout_s:g} s for {len(responses)} "
                f"responses to prompt {prompt.uid} (row {prompt.row})"
            ) from error
        except (BrokenProcessPool, ProcessExpired) as error:
            raise RewardError(f"the worker of reward {reward.function!r} died: {error}") from error
        if isinstance(parts, str):
            raise RewardError(f"reward {reward.function!r} failed on prompt {prompt.uid}:\n{parts}")
        return parts

    def _weighted_sum(self, parts: Sequence[Mapping[str, float]]) -> Score:
        """Raises a RewardError if the sum is too large."""
        weights = [reward.weight for _, reward in self._rewards]
        total = sum(weight * sum(part.values()) for weight, part in zip(weights, parts, strict=True))
        return worker.as_number("the weighted sum", total), {
            name: value for part in parts for name, value in part.items()
        }

    def _active(self) -> ProcessPool:
        """The pool, or a new one if it broke, which happens when an idle worker is killed from outside."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        if not self._pool.active:
            self._pool.stop()
            self._pool = self._new_pool()
        return self._pool

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._workers,
            initializer=worker.prepare_worker,
            initargs=(self._search_path, self._functions),
            context=WorkerContext(),
        )


def with_raw(rewards: Sequence[RewardConfig]) -> bool:
    """Whether a reward sees special tokens."""
    return any("{raw}" in reward.template for reward in rewards)


def decode(tokenizer: Any, raw: bool, token_ids: Int32Array) -> Response:
    """The response of sampled tokens, if `raw` also with special tokens."""
    ids = token_ids.tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Response(text, len(ids), tokenizer.decode(ids, skip_special_tokens=False) if raw else "")


def columns_of(prompt: Prompt) -> Mapping[str, Any]:
    """The columns of a prompt that a reward function gets."""
    return {"prompt": prompt.text, "answer": prompt.answer, "extra": dict(prompt.extra)}
