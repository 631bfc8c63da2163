"""Scores a model on the held-out prompts in an engine of its own, outside of any training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.inference.engine import VllmEngine
from tidemill.models.locate import Locator
from tidemill.protocols import Evaluation
from tidemill.rollout.evaluator import Evaluator
from tidemill.rollout.prompts import load_held_out, load_tokenizer
from tidemill.rollout.reward_pool import RewardPool
from tidemill.rollout.single_engine import SingleEngine

FIRST_VERSION = 0  # of an engine that nobody has sent weights


def score_model(config: RunConfig, folder: Path) -> Evaluation:
    """Greedy answers to `data.held_out` with the run's rewards.

    Args:
        config: of the run.
        folder: Hugging Face folder of the model.

    Raises:
        TidemillError: the engine, a reward function or the data fails.
    """
    return asyncio.run(answer_held_out(config, folder))


async def answer_held_out(config: RunConfig, folder: Path) -> Evaluation:
    """Start an engine and the reward workers, ask everything, end both."""
    tokenizer: Any = load_tokenizer(folder)
    held_out = load_held_out(config.data, tokenizer, config.seed, Locator.of(config).fetch_file)
    rewards = RewardPool(config.rewards)
    settings = config.rollout, config.data.max_prompt_tokens, config.seed, config.sync.transport
    engine = SingleEngine(lambda: VllmEngine(str(folder), *settings))
    try:
        await rewards.start()  # first, because an engine takes what starts beside it for its own, and ends it with it
        await engine.start()
        evaluator = Evaluator(
            config,
            held_out,
            engine.pool,
            rewards,
            lambda token_ids: str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)),
        )
        return await engine.during(evaluator.evaluate(FIRST_VERSION), evaluator.crashes.take_quarantined)
    finally:
        await asyncio.gather(rewards.close(), engine.end())
