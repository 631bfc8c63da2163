"""Inference outside of a run: the evaluation of a model, and its answers to a few prompts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tidemill.config.rollout import RolloutConfig
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, EngineError
from tidemill.inference.engine import VllmEngine
from tidemill.models.hf_config import context_of, vocab_size_of
from tidemill.models.locate import Locator
from tidemill.protocols import Evaluation, Sampling
from tidemill.records import Completion, EngineId, Int32Array
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.evaluator import Evaluator
from tidemill.rollout.failures import LOSSES, CrashLoop
from tidemill.rollout.group_request import TIMEOUTS
from tidemill.rollout.prompts import as_messages, encode, load_held_out, load_tokenizer
from tidemill.rollout.reward_pool import RewardPool, decode, with_raw

FIRST_VERSION = 0  # of an engine that has received no weights
SLOT = EngineId(0)
T = TypeVar("T")


class SingleEngine:
    """A pool of one engine, which is replaced when it dies; evaluations outside of a run need no fleet."""

    def __init__(self, make: Callable[[], VllmEngine]) -> None:
        self._make, self._engine = make, make()
        self._ids = map(EngineId, itertools.count())
        self._crashes = CrashLoop(time.monotonic)
        self.pool = EnginePool({})

    async def start(self) -> None:
        await self._engine.start()
        self.pool.add(next(self._ids), self._engine)

    async def end(self) -> None:
        await self._engine.shutdown()

    async def during(self, work: Coroutine[Any, Any, T], take_quarantined: Callable[[EngineId], int]) -> T:
        """Do some work on the pool, and replace an engine that dies meanwhile.

        Raises:
            EngineError: the next engine does not start, or one after the other dies without finishing anything.
        """
        tasks = asyncio.create_task(work), asyncio.create_task(self._replace_lost(take_quarantined))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else tasks[1].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _replace_lost(self, take_quarantined: Callable[[EngineId], int]) -> Any:
        """Never returns."""
        while True:
            engine_id, why = await self.pool.loss()
            await self.pool.quiet(engine_id, TIMEOUTS.answer_s)
            finished = self.pool.remove(engine_id) + take_quarantined(engine_id)
            if self._crashes.lost(SLOT, finished) >= LOSSES:
                raise EngineError(f"{LOSSES} engines in a row died without finishing a request: {why}")
            await self._engine.shutdown()
            self._engine = self._make()
            await self.start()


async def evaluate_model(config: RunConfig, folder: Path) -> Evaluation:
    """Evaluate a model on `data.held_out` with the run's rewards, on an engine of its own.

    Raises:
        TidemillError: the engine, a reward function or the data fails.
    """
    tokenizer: Any = load_tokenizer(folder)
    fetch, vocab_size = Locator.of(config).fetch_file, vocab_size_of(folder)
    held_out = load_held_out(config.data, tokenizer, config.seed, fetch, vocab_size)
    rewards = RewardPool(config.rewards)
    settings = config.rollout, config.data.max_prompt_tokens, config.seed, config.sync.transport
    engine = SingleEngine(lambda: VllmEngine(str(folder), *settings))
    try:
        # Before the engine, which takes every process that starts after it for one of its own and ends it.
        await rewards.start()
        await engine.start()
        evaluator = Evaluator(
            config,
            held_out,
            engine.pool,
            rewards,
            partial(decode, tokenizer, with_raw(config.rewards)),
        )
        return await engine.during(evaluator.evaluate(FIRST_VERSION), evaluator.crashes.take_quarantined)
    finally:
        await asyncio.gather(rewards.close(), engine.end())


def generate_text(
    model_path: Path | str,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    system_prompt: str | None = None,
) -> list[str]:
    """One answer per prompt, through the chat template and the engine that a run uses.

    Raises:
        EngineError: vLLM cannot start with the model.
        ConfigError: prompt and answer do not fit the model's context.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompt_ids = [encode(tokenizer, as_messages(prompt, system_prompt)) for prompt in prompts]
    check_context(context_of(Path(model_path)), max(map(len, prompt_ids), default=1), max_new_tokens)
    sampling = Sampling(n=1, max_tokens=max_new_tokens, temperature=temperature)
    completions = asyncio.run(complete(str(model_path), prompt_ids, sampling))
    return [tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in completions]


def check_context(context: int | None, longest: int, max_new_tokens: int) -> None:
    if context is None or longest + max_new_tokens <= context:
        return
    if longest >= context:
        fix = "Shorten it, or use a model with a longer context."
        raise ConfigError("PROMPT", f"{longest} tokens", f"less than the model's context of {context} tokens", fix)
    allowed = (
        f"at most {context - longest}: the model's context is {context} tokens and the longest prompt has {longest}"
    )
    raise ConfigError("--max-new-tokens", max_new_tokens, allowed, "Set a lower number, or shorten the prompt.")


async def complete(model_path: str, prompt_ids: Sequence[Int32Array], sampling: Sampling) -> list[Completion]:
    longest = max((len(ids) for ids in prompt_ids), default=1)
    engine = VllmEngine(model_path, RolloutConfig(max_new_tokens=sampling.max_tokens), longest, 0, "shared_memory")
    await engine.start()
    try:
        groups = await asyncio.gather(*(engine.generate(str(i), ids, sampling) for i, ids in enumerate(prompt_ids)))
    finally:
        await engine.shutdown()
    return [group[0] for group in groups]
