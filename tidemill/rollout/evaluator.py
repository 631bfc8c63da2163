"""Greedy scoring of held-out prompts, pinned to one policy version."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from tidemill.config import RunConfig
from tidemill.errors import ConfigError, EngineError, EngineLostError, RewardError, RewardTimeoutError, RunError
from tidemill.protocols import Answer, Evaluation, Sampling
from tidemill.records import Completion, Prompt
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.flights import Decode, Scorer, abort_request
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rewards import Response

PRIORITY = -1  # before rollouts, since a weight sync may wait for the score


class Evaluator:
    """Scores held-out prompts through the engines of the run, beside its training rollouts.

    Args:
        config: `rollout` and `evaluation`.
        held_out: the prompts; `evaluation.max_prompts` takes the first of them.
        engines: shared with the rollouter.
        rewards: the same functions as in training.
        decode: response tokens to text.
    """

    def __init__(
        self, config: RunConfig, held_out: PromptSet | None, engines: EnginePool, rewards: Scorer, decode: Decode
    ) -> None:
        self._config, self._held_out, self._engines = config, held_out, engines
        self._rewards, self._decode = rewards, decode
        self._requests = itertools.count()

    async def evaluate(self, version: int, engine: str | None = None) -> Evaluation:
        """One greedy answer a prompt, every token of it sampled from `version`.

        Args:
            version: of the engines, which must not change meanwhile.
            engine: the one that answers; None takes all.

        Raises:
            ConfigError: there are no held-out prompts.
            EngineLostError: the engine that was named is lost.
            EngineError: an engine keeps failing, or samples from another version.
            RewardError: no prompt could be scored.
        """
        held_out = self._held_out
        if held_out is None:
            raise ConfigError("data.held_out", None, "a source of prompts", "An evaluation needs held-out prompts.")
        count = min(self._config.evaluation.max_prompts or len(held_out), len(held_out))
        prompts = [held_out.at(row) for row in range(count)]
        fitting = [prompt for prompt in prompts if not held_out.too_long(prompt)]
        if not fitting:
            raise RunError(f"all {len(prompts)} held-out prompts exceed data.max_prompt_tokens; raise it")
        width = self._config.rollout.concurrent_samples_per_replica
        slots = asyncio.Semaphore(width * (1 if engine else max(1, len(self._engines))))
        tasks = [asyncio.create_task(self._answer(prompt, version, engine, slots)) for prompt in fitting]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
        if not answers:
            raise failures[-1]
        skipped = Counter("reward_timeout" if isinstance(f, RewardTimeoutError) else "reward_error" for f in failures)
        skipped["too_long"] = len(prompts) - len(fitting)
        score = sum(answer.reward for answer in answers) / len(answers)
        return Evaluation(version, score, tuple(answers), {name: n for name, n in skipped.items() if n})

    async def _answer(
        self, prompt: Prompt, version: int, engine: str | None, slots: asyncio.Semaphore
    ) -> Answer | RewardError:
        async with slots:
            completion = await self._persist(prompt, engine)
            check_version(prompt, completion, version)
            text = self._decode(completion.token_ids)
            try:
                [(reward, _)] = await self._rewards.score(prompt, [Response(text, len(completion.token_ids))])
            except RewardError as error:
                return error
            return Answer(prompt.text, text, prompt.answer, reward)

    async def _persist(self, prompt: Prompt, engine: str | None) -> Completion:
        """Generate, again after a failure, `rollout.max_attempts` times in all; a lost engine counts as none."""
        attempt = 1
        while True:
            try:
                return await self._generate(prompt, engine)
            except EngineLostError:
                if engine is not None:
                    raise
                await self._engines.ready(self._config.rollout.start_timeout_s)
                continue
            except (EngineError, TimeoutError) as error:
                if attempt >= self._config.rollout.max_attempts:
                    raise EngineError(
                        f"held-out prompt {prompt.row} failed {attempt} times: {type(error).__name__}: {error}"
                    ) from error
            attempt += 1

    async def _generate(self, prompt: Prompt, engine: str | None) -> Completion:
        rollout, stop = self._config.rollout, tuple(self._config.rollout.stop)
        sampling = Sampling(1, rollout.max_new_tokens, temperature=0.0, stop=stop, priority=PRIORITY)
        request_id = f"evaluation-{prompt.row}.{next(self._requests)}"
        with self._engines.lease(engine) as seat:
            try:
                async with asyncio.timeout(rollout.group_timeout_s):
                    [completion] = await seat.engine.generate(request_id, prompt.token_ids, sampling)
            except (TimeoutError, asyncio.CancelledError):
                await abort_request(seat.engine, request_id)
                raise
            if completion.finish_reason == "abort":
                raise EngineError(f"the engine aborted held-out prompt {prompt.row}")
            return completion


def check_version(prompt: Prompt, completion: Completion, version: int) -> None:
    """Refuse an answer that is not entirely of `version`."""
    found = sorted({span.version for span in completion.versions} - {version})
    if found:
        raise EngineError(
            f"held-out prompt {prompt.row} was answered by versions {found}, not by {version} alone; "
            "weights must not be updated during an evaluation"
        )
