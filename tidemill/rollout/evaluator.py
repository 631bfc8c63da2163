"""Evaluation: greedy answers to the held-out prompts, all sampled from one policy version, and their mean reward."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from tidemill.config.run import RunConfig
from tidemill.errors import (
    ConfigError,
    EngineCrashedError,
    EngineError,
    EngineLostError,
    RewardError,
    RewardTimeoutError,
    RunError,
)
from tidemill.protocols import Answer, Evaluation, Sampling
from tidemill.records import Completion, EngineId, Prompt
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.failures import HeldOutCrashQuarantine
from tidemill.rollout.group_request import TIMEOUTS, Decode, Scorer, Timeouts, abort_request
from tidemill.rollout.prompts import PromptSet, UnusablePromptError

Outcome = Answer | RewardError | EngineLostError | None
"""Of a held-out prompt; None if its engine crashed and the prompt is to be generated later, or never."""
StopRetrying = Callable[[int], bool]
PRIORITY = -1  # before rollouts, since a weight sync may wait for the evaluation


class Evaluator:
    """Evaluates a version on held-out prompts, on engines that may generate training rollouts at the same time.

    Attributes:
        crashes: counts engine crashes by held-out prompt.
        exclusive: a prompt that may crash its engine is being generated, and no group may start beside it.
    """

    def __init__(
        self,
        config: RunConfig,
        held_out: PromptSet | None,
        engines: EnginePool,
        rewards: Scorer,
        decode: Decode,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self._config, self._held_out, self._engines = config, held_out, engines
        self._rewards, self._decode, self._timeouts = rewards, decode, timeouts
        self._request_numbers = itertools.count()
        self.crashes = HeldOutCrashQuarantine(config.rollout.max_attempts)
        self.exclusive = False

    async def evaluate(self, version: int, engine: EngineId | None = None) -> Evaluation:
        """One greedy answer a prompt, every token of it sampled from `version`.

        A prompt that crashes one engine after the other is skipped, as `HeldOutCrashQuarantine` says.

        Args:
            version: of the engines, which must not change meanwhile.
            engine: the engine that answers; None uses all.

        Raises:
            ConfigError: there are no held-out prompts.
            EngineLostError: the named engine is lost.
            EngineError: an engine keeps failing, or samples from another version.
            RewardError: no prompt could be scored.
        """
        held_out = self._held_out
        if held_out is None:
            raise ConfigError("data.held_out", None, "a source of prompts", "An evaluation needs held-out prompts.")
        count = min(self._config.evaluation.max_prompts or len(held_out), len(held_out))
        prompts, skipped = usable_prompts(held_out, count)
        outcomes = await self._outcomes(prompts, version, engine)
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        skipped.update(skip_reason(outcome) for outcome in outcomes if not isinstance(outcome, Answer))
        if not answers:
            errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
            raise errors[-1] if errors else EngineError(f"all {len(outcomes)} held-out prompts crash their engine")
        score = sum(answer.reward for answer in answers) / len(answers)
        return Evaluation(version, score, tuple(answers), dict(skipped))

    async def _outcomes(self, prompts: Sequence[Prompt], version: int, engine: EngineId | None) -> list[Outcome]:
        """Answer concurrently; after engine crashes, first generate the prompts that must run alone."""
        self.crashes.check()
        outcomes: dict[int, Outcome] = {}
        while left := [p for p in prompts if outcomes.get(p.row) is None and not self.crashes.quarantined(p.row)]:
            for prompt in filter(lambda prompt: self.crashes.must_run_alone(prompt.row), left):
                outcomes[prompt.row] = await self._answer_alone(prompt, version, engine)
            others = [prompt for prompt in left if not self.crashes.must_run_alone(prompt.row)]
            outcomes |= await self._answer_concurrently(others, version, engine)
        return [outcomes.get(prompt.row) for prompt in prompts]

    async def _answer_concurrently(
        self, prompts: Sequence[Prompt], version: int, engine: EngineId | None
    ) -> dict[int, Outcome]:
        """Outcomes by row; once a prompt must run alone, no further request starts and the rest are None."""
        per_engine = self._config.rollout.concurrent_samples_per_replica
        slots = asyncio.Semaphore(per_engine * (1 if engine else max(1, len(self._engines))))

        async def answer(prompt: Prompt) -> Outcome:
            async with slots:
                try:
                    return await self._answer(prompt, version, engine, lambda row: self.crashes.pending)
                except EngineLostError as error:
                    return error  # the other requests of the engine still have to report its crash

        tasks = [asyncio.create_task(answer(prompt)) for prompt in prompts]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for outcome in outcomes:
            if isinstance(outcome, EngineLostError):
                raise outcome
        return {prompt.row: outcome for prompt, outcome in zip(prompts, outcomes, strict=True)}

    async def _answer_alone(self, prompt: Prompt, version: int, engine: EngineId | None) -> Outcome:
        """Answer one prompt with no other request on its engine.

        No group starts meanwhile. An engine given by name gets no groups anyway.

        Raises:
            EngineError: too many prompts crash their engine.
        """
        self.exclusive = engine is None
        try:
            await self._engines.quiet(engine, self._config.rollout.group_timeout_s)
            outcome = await self._answer(prompt, version, engine, self.crashes.quarantined)
        finally:
            self.exclusive = False
        self.crashes.check()
        return outcome

    async def _answer(self, prompt: Prompt, version: int, engine: EngineId | None, stop: StopRetrying) -> Outcome:
        completion = await self._complete(prompt, engine, stop)
        if completion is None:
            return None
        check_version(prompt, completion, version)
        response = self._decode(completion.token_ids)
        try:
            [(reward, _)] = await self._rewards.score(prompt, [response])
        except RewardError as error:
            return error
        return Answer(prompt.text, str(response), prompt.answer, reward)

    async def _complete(self, prompt: Prompt, engine: EngineId | None, stop: StopRetrying) -> Completion | None:
        """Generate, with up to `rollout.max_attempts` attempts; the loss of an engine does not count as one.

        Returns:
            None once `stop(row)` holds, because engines crashed.
        """
        attempt = 1
        while not stop(prompt.row):
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
        return None

    async def _generate(self, prompt: Prompt, engine: EngineId | None) -> Completion:
        rollout = self._config.rollout
        sampling = Sampling(1, rollout.max_new_tokens, temperature=0.0, stop=tuple(rollout.stop), priority=PRIORITY)
        request_id = f"evaluation-{prompt.row}.{next(self._request_numbers)}"
        with self._engines.lease(engine, held_out=True) as leased:
            try:
                async with asyncio.timeout(rollout.group_timeout_s):
                    [completion] = await leased.engine.generate(request_id, prompt.token_ids, sampling)
            except EngineCrashedError:
                self.crashes.crashed(prompt.row, leased.id)
                raise
            except (TimeoutError, asyncio.CancelledError):
                await abort_request(leased.engine, request_id, self._timeouts.abort_s)
                raise
            if completion.finish_reason == "abort":
                raise EngineError(f"the engine aborted held-out prompt {prompt.row}")
            self.crashes.answered(prompt.row)
            return completion


def usable_prompts(held_out: PromptSet, count: int) -> tuple[list[Prompt], Counter[str]]:
    """Of the first `count` rows, the prompts that an engine can get, and the number of others by reason.

    Raises:
        RunError: no prompt can be used.
    """
    prompts, skipped, last = [], Counter[str](), None
    for row in range(count):
        try:
            prompts.append(held_out.at(row))
        except UnusablePromptError as error:
            skipped[error.reason] += 1
            last = error
    if not prompts:
        raise RunError(f"none of the {count} held-out prompts can be used. The last one is {last}")
    return prompts, skipped


def skip_reason(outcome: Outcome) -> str:
    if isinstance(outcome, RewardError):
        return "reward_timeout" if isinstance(outcome, RewardTimeoutError) else "reward_error"
    return "kills_engine"


def check_version(prompt: Prompt, completion: Completion, version: int) -> None:
    found = sorted({span.version for span in completion.versions} - {version})
    if found:
        raise EngineError(
            f"held-out prompt {prompt.row} was answered by versions {found}, not by {version} alone; "
            "weights must not be updated during an evaluation"
        )
