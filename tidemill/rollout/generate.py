"""Answers of a model to a few prompts, outside of any run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import ConfigError
from tidemill.inference.engine import VllmEngine
from tidemill.models.locate import context_of
from tidemill.protocols import Sampling
from tidemill.records import Completion, Int32Array
from tidemill.rollout.prompts import as_messages, encode


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
    completions = asyncio.run(answer(str(model_path), prompt_ids, sampling))
    return [tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in completions]


def check_context(context: int | None, longest: int, max_new_tokens: int) -> None:
    """Refuse at once what the engine would refuse after its start.

    Args:
        context: tokens that the model can attend to; None if it does not say.
        longest: tokens of the longest prompt, with the chat template around it.
        max_new_tokens: longest answer.

    Raises:
        ConfigError: both together are longer.
    """
    if context is None or longest + max_new_tokens <= context:
        return
    if longest >= context:
        fix = "Shorten it, or take a model with a longer context."
        raise ConfigError("PROMPT", f"{longest} tokens", f"less than the model's context of {context} tokens", fix)
    allowed = (
        f"at most {context - longest}: the model's context is {context} tokens and the longest prompt has {longest}"
    )
    raise ConfigError("--max-new-tokens", max_new_tokens, allowed, "Ask for less, or shorten the prompt.")


async def answer(model_path: str, prompt_ids: Sequence[Int32Array], sampling: Sampling) -> list[Completion]:
    """Start an engine, ask everything at once, end it."""
    longest = max((len(ids) for ids in prompt_ids), default=1)
    engine = VllmEngine(model_path, RolloutConfig(max_new_tokens=sampling.max_tokens), longest, 0, "shared_memory")
    await engine.start()
    try:
        groups = await asyncio.gather(*(engine.generate(str(i), ids, sampling) for i, ids in enumerate(prompt_ids)))
    finally:
        await engine.shutdown()
    return [group[0] for group in groups]
