"""Prompts and rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from tidemill.config.section import Number, Positive, Seconds, Section, Text


class DataConfig(Section):
    """Where prompts come from."""

    train: Text
    """Prompts to train on: a `.jsonl` or `.parquet` file (relative to the config file, or `s3://BUCKET/KEY` at
    `store.endpoint`), `hf://DATASET:SPLIT`, or `reasoning_gym://TASK`. The last two accept the options of
    `datasets.load_dataset` and of `reasoning_gym.create_dataset`: `hf://openai/gsm8k:train?name=main`,
    `reasoning_gym://TASK?seed=2&size=50`."""
    held_out: Text | None = None
    """Prompts for evaluation only, in the same forms; they score the policy before, during and after training."""
    prompt_key: Text = "prompt"
    """Column of the question: a string, or a list of chat messages with `role` and `content`."""
    answer_key: Text = "answer"
    """Column of the reference answer, or `a.b` for a value in the mappings of column `a`; the data may lack it.
    Rewards also get all other columns."""
    system_prompt: str | None = None
    """System message before a string prompt; null leaves it to the model's chat template."""
    max_prompt_tokens: Positive = 1024
    """A longer prompt is skipped, counted and reported, never cut. Together with `rollout.max_new_tokens` this is the
    context length that an engine reserves memory for."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, from `seed`."""
    epochs: Positive | None = None
    """Passes over the data; null repeats them until `trainer.steps` is reached."""


class RewardConfig(Section):
    """One reward function; a rollout's reward is the weighted sum of all of them."""

    function: Text
    """`exact_number` (the first number in the response against the answer), `math_verify`, `reasoning_gym`, `overlong`
    (soft punishment of long responses, with the options `budget`, `buffer` and `penalty`), or an import path
    `package.module:function` of an installed module or, after those, of one in the working directory."""
    weight: Number = 1.0
    """Factor in the sum."""
    timeout_s: Seconds = 10.0
    """Deadline for all responses of a group together, which one process scores one after the other. A call that takes
    longer is killed with its process and every process that this has started, and counted; the group is tried again."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to every call, besides `response`, which says what the function sees of a response:
    `{text}` (the default) is the text of the sampled tokens without special tokens, `{raw}` includes them, and either
    may stand in a longer text. Neither has what the chat template puts before the response; for a template that ends
    with `<think>`, set `response` to `<think>{text}`."""

    @property
    def template(self) -> str:
        """What the function gets as its response, with the part `{text}` or `{raw}`."""
        return str(self.options.get("response", "{text}"))

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {name: value for name, value in self.options.items() if name != "response"}

    @field_validator("options")
    @classmethod
    def _has_one_part(cls, options: dict[str, Any]) -> dict[str, Any]:
        template = options.get("response", "{text}")
        if not isinstance(template, str) or template.count("{text}") + template.count("{raw}") != 1:
            raise ValueError("response must be a text that has {text} or {raw} once, such as <think>{text}")
        return options


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """A unique short name for every function: the part after the colon, with a number from the second use on."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        name = reward.function.rpartition(":")[2]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names
