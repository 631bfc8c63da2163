"""Greedy scoring of held-out prompts, pinned to one policy version."""

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
    TidemillError,
)
from tidemill.protocols import Answer, Evaluation, Sampling
from tidemill.records import Completion, Prompt
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.failures import HeldOutSuspects
from tidemill.rollout.in_flight import Decode, Scorer, abort_request
from tidemill.rollout.prompts import PromptSet
from tidemill.rollout.rewards import Response

Outcome = Answer | RewardError | EngineLostError | None
"""Of a held-out prompt; None if engines died under it."""
GivenUp = Callable[[int], bool]
PRIORITY = -1  # before rollouts, since a weight sync may wait for the score


class Evaluator:
    """Scores held-out prompts through the engines of the run, beside its training rollouts.

    Args:
        config: `rollout` and `evaluation`.
        held_out: the prompts; `evaluation.max_prompts` takes the first of them.
        engines: shared with the rollouter.
        rewards: the same functions as in training.
        decode: response tokens to text.

    Attributes:
        suspects: prompts that may kill their engine.
        alone: one of them is being asked, and no group may start beside it.
    """

    def __init__(
        self, config: RunConfig, held_out: PromptSet | None, engines: EnginePool, rewards: Scorer, decode: Decode
    ) -> None:
        self._config, self._held_out, self._engines = config, held_out, engines
        self._rewards, self._decode = rewards, decode
        self._requests = itertools.count()
        self.suspects = HeldOutSuspects(config.rollout.max_attempts)
        self.alone = False

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

        A prompt that kills one engine after the other is skipped, see `HeldOutSuspects`.
        """
        held_out = self._held_out
        if held_out is None:
            raise ConfigError("data.held_out", None, "a source of prompts", "An evaluation needs held-out prompts.")
        count = min(self._config.evaluation.max_prompts or len(held_out), len(held_out))
        prompts = [held_out.at(row) for row in range(count)]
        fitting = [prompt for prompt in prompts if not held_out.too_long(prompt)]
        if not fitting:
            raise RunError(f"all {len(prompts)} held-out prompts exceed data.max_prompt_tokens; raise it")
        outcomes = await self._ask_all(fitting, version, engine)
        answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
        skipped = Counter(reason_of(outcome) for outcome in outcomes if not isinstance(outcome, Answer))
        if not answers:
            raise nothing_scored(outcomes)
        skipped["too_long"] = len(prompts) - len(fitting)
        score = sum(answer.reward for answer in answers) / len(answers)
        return Evaluation(version, score, tuple(answers), {name: n for name, n in skipped.items() if n})

    async def _ask_all(self, prompts: Sequence[Prompt], version: int, engine: str | None) -> list[Outcome]:
        """Ask side by side; whenever engines have died under a prompt, first see about that one.

        Raises:
            EngineLostError: the engine that was named is lost.
            EngineError: too many prompts kill their engine.
        """
        self.suspects.check()
        outcomes: dict[int, Outcome] = {}
        while left := [p for p in prompts if outcomes.get(p.row) is None and not self.suspects.condemned(p.row)]:
            for prompt in filter(lambda prompt: self.suspects.suspected(prompt.row), left):
                outcomes[prompt.row] = await self._alone(prompt, version, engine)
            others = [prompt for prompt in left if not self.suspects.suspected(prompt.row)]
            outcomes |= await self._side_by_side(others, version, engine)
        return [outcomes.get(prompt.row) for prompt in prompts]

    async def _side_by_side(self, prompts: Sequence[Prompt], version: int, engine: str | None) -> dict[int, Outcome]:
        """Outcomes by row, as far as they come before there is a suspect.

        Raises:
            EngineLostError: the engine that was named is lost.
        """
        width = self._config.rollout.concurrent_samples_per_replica
        slots = asyncio.Semaphore(width * (1 if engine else max(1, len(self._engines))))
        tasks = [asyncio.create_task(self._in_turn(prompt, version, engine, slots)) for prompt in prompts]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        for outcome in outcomes:
            if isinstance(outcome, EngineLostError):
                raise outcome
        return {prompt.row: outcome for prompt, outcome in zip(prompts, outcomes, strict=True)}

    async def _in_turn(self, prompt: Prompt, version: int, engine: str | None, slots: asyncio.Semaphore) -> Outcome:
        """Ask beside others. The loss of a named engine is returned, so that all whom it hits are heard."""
        async with slots:
            try:
                return await self._answer(prompt, version, engine, lambda row: self.suspects.waiting)
            except EngineLostError as error:
                return error

    async def _alone(self, prompt: Prompt, version: int, engine: str | None) -> Outcome:
        """Ask with nothing beside it: no group starts meanwhile, except on other engines than the named one.

        Raises:
            EngineError: too many prompts kill their engine.
        """
        self.alone = engine is None
        try:
            await self._engines.quiet(engine, self._config.rollout.group_timeout_s)
            outcome = await self._answer(prompt, version, engine, self.suspects.condemned)
        finally:
            self.alone = False
        self.suspects.check()
        return outcome

    async def _answer(self, prompt: Prompt, version: int, engine: str | None, given_up: GivenUp) -> Outcome:
        completion = await self._persist(prompt, engine, given_up)
        if completion is None:
            return None
        check_version(prompt, completion, version)
        text = self._decode(completion.token_ids)
        try:
            [(reward, _)] = await self._rewards.score(prompt, [Response(text, len(completion.token_ids))])
        except RewardError as error:
            return error
        return Answer(prompt.text, text, prompt.answer, reward)

    async def _persist(self, prompt: Prompt, engine: str | None, given_up: GivenUp) -> Completion | None:
        """Generate, again after a failure, `rollout.max_attempts` times in all; a lost engine counts as none.

        Returns:
            None for a row that is given up, because engines died under it.
        """
        attempt = 1
        while not given_up(prompt.row):
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

    async def _generate(self, prompt: Prompt, engine: str | None) -> Completion:
        request_id = f"evaluation-{prompt.row}.{next(self._requests)}"
        with self._engines.lease(engine, held_out=True) as seat:
            try:
                async with asyncio.timeout(self._config.rollout.group_timeout_s):
                    [completion] = await seat.engine.generate(request_id, prompt.token_ids, self._sampling())
            except EngineCrashedError:
                self.suspects.crashed(prompt.row, seat.name)
                raise
            except (TimeoutError, asyncio.CancelledError):
                await abort_request(seat.engine, request_id)
                raise
            if completion.finish_reason == "abort":
                raise EngineError(f"the engine aborted held-out prompt {prompt.row}")
            self.suspects.answered(prompt.row)
            return completion

    def _sampling(self) -> Sampling:
        rollout = self._config.rollout
        return Sampling(1, rollout.max_new_tokens, temperature=0.0, stop=tuple(rollout.stop), priority=PRIORITY)


def reason_of(outcome: Outcome) -> str:
    """Why a prompt has no answer."""
    if isinstance(outcome, RewardError):
        return "reward_timeout" if isinstance(outcome, RewardTimeoutError) else "reward_error"
    return "kills_engine"


def nothing_scored(outcomes: Sequence[Outcome]) -> TidemillError:
    """What to say where no prompt has an answer."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    return errors[-1] if errors else EngineError(f"all {len(outcomes)} held-out prompts kill their engine")


def check_version(prompt: Prompt, completion: Completion, version: int) -> None:
    """Refuse an answer that is not entirely of `version`."""
    found = sorted({span.version for span in completion.versions} - {version})
    if found:
        raise EngineError(
            f"held-out prompt {prompt.row} was answered by versions {found}, not by {version} alone; "
            "weights must not be updated during an evaluation"
        )
