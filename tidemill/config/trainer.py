"""The optimizer and its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import Count, NonNegative, Positive, Seconds, Section


class TrainerConfig(Section):
    """The optimizer and its steps."""

    steps: Positive
    """Steps of the whole run, each of `asynchrony.require_batches` optimizer steps; may be left out if
    `rollout.total_rollout_steps` is given."""
    ppo_mini_batch_size: Positive = 16
    """Groups (prompts) per mini-batch, that is per optimizer step."""
    ranks: Positive = 1
    """Trainer processes. Several split the rows of a step, and each holds its shard of every parameter (FSDP)."""
    micro_batch_tokens: Positive = 4096
    """Tokens of packed groups in one forward pass; a longer group has a pass of its own."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up; constant after."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Gradients are clipped to this global norm."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision over fp32 master weights; auto is bfloat16 where the processor computes in it."""
    threads: Positive | None = None
    """Intra-op threads of a trainer rank on the CPU; null uses all cores."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    get_timeout_s: Seconds = 1800.0
    """The run fails, naming what is in flight, if no full batch arrives within this time."""
