"""One attempt at a group: generate, decode, score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tidemill.config.run import RunConfig
from tidemill.errors import EngineError, EngineLostError, RewardError, RewardTimeoutError
from tidemill.protocols import Engine, Sampling
from tidemill.records import Completion, Group, Prompt, Rollout
from tidemill.rollout.activity import Clock, IdleMeter
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.failures import FlightFailure
from tidemill.rollout.in_flight import Decode, Flight, Scorer, give_up, group_seed, tokens_of
from tidemill.rollout.rewards import Response


class Producer:
    """Turns a prompt into a finished group.

    Args:
        config: `rollout`, the seed and the staleness bound.
        engines: to generate on.
        rewards: scores responses.
        decode: response tokens to text.
        idle: is told when a generation begins and ends.
        wasted: is told of tokens that were sampled for nothing.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        rewards: Scorer,
        decode: Decode,
        idle: IdleMeter,
        clock: Clock,
        wasted: Callable[[int], None],
    ) -> None:
        self._config, self._engines, self._rewards = config.rollout, engines, rewards
        self._decode, self._idle, self._clock, self._wasted = decode, idle, clock, wasted
        self._seed = config.seed if config.synchronous else None

    async def generate(self, flight: Flight, failures: int) -> list[Completion]:
        """Sample the group; a time-out and a cancellation abort the request on the engine.

        A synchronous run can be reproduced, and the group is seeded by `group_seed`. Otherwise timing decides which
        version samples what, and unseeded sampling is faster in vLLM.

        Raises:
            FlightFailure: "engine_lost", "timeout", "engine_error", "aborted" (though nobody asked) or "empty" (no
                token at all).
        """
        self._idle.enter()
        try:
            with self._engines.lease() as seat:
                flight.engine = seat.name
                return await self._request(seat.engine, flight, self._sampling(flight.uid, failures))
        except EngineLostError as error:
            raise FlightFailure("engine_lost") from error
        except EngineError as error:
            raise FlightFailure("engine_error") from error
        finally:
            self._idle.leave()

    async def score(self, flight: Flight, completions: Sequence[Completion]) -> Group:
        """Decode and score.

        Raises:
            FlightFailure: "reward_timeout" or "reward_error".
        """
        texts = [self._decode(completion.token_ids) for completion in completions]
        responses = [Response(text, len(c.token_ids)) for text, c in zip(texts, completions, strict=True)]
        try:
            # The pool has its own deadlines; this one is for workers that do not even start.
            async with asyncio.timeout(self._config.group_timeout_s):
                scores = await self._rewards.score(flight.prompt, responses)
        except (TimeoutError, RewardTimeoutError) as error:
            raise FlightFailure("reward_timeout") from error
        except RewardError as error:
            raise FlightFailure("reward_error") from error
        return make_group(flight.prompt, completions, texts, scores, self._clock() - flight.started)

    def _sampling(self, uid: int, failures: int) -> Sampling:
        config = self._config
        seed = None if self._seed is None else group_seed(self._seed, uid, failures)
        return Sampling(config.group_size, config.max_new_tokens, config.temperature, seed, tuple(config.stop))

    async def _request(self, engine: Engine, flight: Flight, sampling: Sampling) -> list[Completion]:
        answer = asyncio.ensure_future(engine.generate(flight.request_id, flight.prompt.token_ids, sampling))
        try:
            async with asyncio.timeout(self._config.group_timeout_s):
                completions = await asyncio.shield(answer)  # which tells, after an abort, how much was sampled
        except TimeoutError as error:
            self._wasted(await give_up(engine, flight.request_id, answer))
            raise FlightFailure("timeout") from error
        except asyncio.CancelledError:
            self._wasted(await give_up(engine, flight.request_id, answer))
            raise
        if any(completion.finish_reason == "abort" for completion in completions):
            self._wasted(tokens_of(completions))
            raise FlightFailure("aborted")
        if not all(len(completion.token_ids) for completion in completions):
            raise FlightFailure("empty")
        return completions


def make_group(
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scores: Sequence[tuple[float, Mapping[str, float]]],
    seconds: float,
) -> Group:
    """Join what the engine sampled with what the rewards said; every token is the policy's own."""
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
