"""One attempt at a group: sample the responses to a prompt, decode and score them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from tidemill.config.run import RunConfig
from tidemill.errors import EngineError, EngineLostError, RewardError, RewardTimeoutError
from tidemill.protocols import Engine, Sampling
from tidemill.records import Completion, EngineId, Group, Int32Array, Prompt, Rollout
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.rewards import Response

LOG = logging.getLogger(__name__)

Stage = Literal["generating", "scoring", "delivering"]
Clock = Callable[[], float]
Decode = Callable[[Int32Array], Response]


class Scorer(Protocol):
    """Scores the responses to a prompt: `reward_pool.RewardPool`."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Sequence[tuple[float, Mapping[str, float]]]:
        """Total and parts for every response, in order.

        Raises:
            RewardTimeoutError: a function did not return in time.
            RewardError: a function failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines, in seconds, of calls that normally return at once.

    Attributes:
        abort_s: for an engine to accept an abort.
        answer_s: for an aborted request to return.
        put_s: for one attempt to put a group into a full queue. Between two attempts the rollouter checks that the
            group is still needed.
    """

    abort_s: float = 10.0
    answer_s: float = 1.0
    put_s: float = 1.0


TIMEOUTS = Timeouts()


@dataclass(slots=True)
class GroupRequest:
    """One dispatch of one prompt occurrence, from its start until its group is in the queue."""

    prompt: Prompt  # of the occurrence
    number: int  # ordinal of the dispatch in this process; makes the request id unique
    version: int  # the policy version at dispatch: no token can be older
    started: float  # when, by the rollouter's clock
    engine: EngineId | None = None  # the engine that generates it, or generated it
    stage: Stage = "generating"  # "delivering" begins when the group is scored
    task: asyncio.Task[None] | None = field(default=None, repr=False)  # runs the request; set right after its creation

    @property
    def uid(self) -> int:
        return self.prompt.uid

    @property
    def request_id(self) -> str:
        return f"{self.uid}.{self.number}"


class RequestFailed(Exception):
    """A group request failed for `reason`; the cause, if any, is chained. Never leaves the rollouter."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class GroupGenerator:
    """Turns a prompt into a finished group.

    It calls `count_waste` with the number of tokens that a failed or cancelled request had sampled.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        rewards: Scorer,
        decode: Decode,
        clock: Clock,
        count_waste: Callable[[int], None],
        timeouts: Timeouts,
    ) -> None:
        self._config, self._engines, self._rewards = config.rollout, engines, rewards
        self._decode, self._clock, self._count_waste, self._timeouts = decode, clock, count_waste, timeouts
        self._seed = config.seed if config.synchronous else None

    async def generate(self, request: GroupRequest, failures: int) -> list[Completion]:
        """Sample the group; a time-out and a cancellation abort the request on the engine.

        A synchronous run is reproducible: `group_seed` seeds each group. In an asynchronous run timing decides which
        version samples a token, so requests have no seed; vLLM samples faster without one.

        Raises:
            RequestFailed: "engine_lost", "timeout", "engine_error", "aborted" (the engine ended it by itself) or
                "empty" (a response without any token).
        """
        try:
            with self._engines.lease() as leased:
                request.engine = leased.id
                return await self._complete(leased.engine, request, self._sampling(request.uid, failures))
        except EngineLostError as error:
            raise RequestFailed("engine_lost") from error
        except EngineError as error:
            raise RequestFailed("engine_error") from error

    async def score(self, request: GroupRequest, completions: Sequence[Completion]) -> Group:
        """Decode and score the completions.

        Raises:
            RequestFailed: "reward_timeout" or "reward_error".
        """
        responses = [self._decode(completion.token_ids) for completion in completions]
        try:
            # The pool has its own deadlines; this one is for workers that do not even start.
            async with asyncio.timeout(self._config.group_timeout_s):
                scores = await self._rewards.score(request.prompt, responses)
        except (TimeoutError, RewardTimeoutError) as error:
            raise RequestFailed("reward_timeout") from error
        except RewardError as error:
            raise RequestFailed("reward_error") from error
        return make_group(
            request.prompt, completions, list(map(str, responses)), scores, self._clock() - request.started
        )

    def _sampling(self, uid: int, failures: int) -> Sampling:
        config = self._config
        seed = None if self._seed is None else group_seed(self._seed, uid, failures)
        return Sampling(config.group_size, config.max_new_tokens, config.temperature, seed, tuple(config.stop))

    async def _complete(self, engine: Engine, request: GroupRequest, sampling: Sampling) -> list[Completion]:
        answer = asyncio.ensure_future(engine.generate(request.request_id, request.prompt.token_ids, sampling))
        try:
            async with asyncio.timeout(self._config.group_timeout_s):
                # The shield keeps the answer alive: after an abort it says how many tokens were sampled.
                completions = await asyncio.shield(answer)
        except TimeoutError as error:
            self._count_waste(await self._abort(engine, request.request_id, answer))
            raise RequestFailed("timeout") from error
        except asyncio.CancelledError:
            self._count_waste(await self._abort(engine, request.request_id, answer))
            raise
        if any(completion.finish_reason == "abort" for completion in completions):
            self._count_waste(token_count(completions))
            raise RequestFailed("aborted")
        if not all(len(completion.token_ids) for completion in completions):
            raise RequestFailed("empty")
        return completions

    async def _abort(self, engine: Engine, request_id: str, answer: asyncio.Future[list[Completion]]) -> int:
        """Abort a request; returns the tokens that it had sampled, or 0 if `answer` does not arrive in time."""
        await abort_request(engine, request_id, self._timeouts.abort_s)
        await asyncio.wait([answer], timeout=self._timeouts.answer_s)
        if not answer.done():
            answer.cancel()
            return 0
        return 0 if answer.cancelled() or answer.exception() is not None else token_count(answer.result())


def group_seed(seed: int, uid: int, failures: int) -> int:
    """Sampling seed of a group in [0, 2^31), a function of the run's seed, the occurrence and its failed attempts.

    After a failure the next attempt must sample other tokens. After a drop or a restart it must sample the same ones,
    which makes a resumed synchronous run equal to an uninterrupted one.
    """
    digest = hashlib.blake2b(repr((seed, uid, failures)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def token_count(completions: Sequence[Completion]) -> int:
    return sum(len(completion.token_ids) for completion in completions)


async def abort_request(engine: Engine, request_id: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.abort([request_id])
    except (TimeoutError, EngineError) as error:
        LOG.warning("request %s could not be aborted: %r", request_id, error)


def make_group(
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scores: Sequence[tuple[float, Mapping[str, float]]],
    seconds: float,
) -> Group:
    """Join completions and rewards; every token is the policy's own, so the loss mask is 1 throughout."""
    rollouts = [
        Rollout(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            loss_mask=np.ones(len(completion.token_ids), dtype=np.float32),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            reward=reward,
            reward_parts=parts,
            seconds=seconds,
        )
        for completion, text, (reward, parts) in zip(completions, texts, scores, strict=True)
    ]
    return Group(prompt, tuple(rollouts))
