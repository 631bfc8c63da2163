"""The algorithm and the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import Count, NonNegative, Positive, Seconds, Section

OldLogProb = Literal["rollout", "version_start", "decoupled"]


class AlgorithmConfig(Section):
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300) and the clipped surrogate loss of PPO
    (Schulman et al. 2017, arXiv:1707.06347).
    """

    normalize_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low."""
    clip_ratio_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """The ratio is clipped above at 1 + clip_ratio_high; a larger value than clip_ratio_low is DAPO's clip-higher."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 3.0
    """Bound of the loss for negative advantages (Ye et al. 2020, arXiv:1912.09729); null leaves it out."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || reference); above 0 a frozen copy of the first policy is kept."""
    aggregation: Literal["token", "sequence"] = "token"
    """Average over all response tokens of the optimizer step, or first over each sequence."""
    old_log_prob: OldLogProb = "rollout"
    """Denominator of the ratio in the loss: `rollout`, the engine's log-probs at sampling; `version_start`, those of
    the parameters at the start of the current version (verl's MIS); `decoupled`, those of the proximal policy, and the
    loss is weighted by proximal over sampling probability (Fu et al. 2025, arXiv:2505.24298, equation 5)."""
    proximal: Literal["exact", "loglinear"] = "exact"
    """Log-probs of the proximal policy of `old_log_prob: decoupled`: `exact`, by a forward pass of the parameters at
    the start of the version; `loglinear`, interpolated between those at sampling and the current ones by the token's
    version (Li et al. 2025, arXiv:2512.06547), without that pass and without a second copy of the parameters."""
    behaviour_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    """Largest weight of a token with `old_log_prob: decoupled`; larger ones are truncated to it. Null sets no limit."""

    @property
    def keeps_version_start(self) -> bool:
        """Whether steps after the first of a version need the parameters at its start."""
        return self.old_log_prob != "rollout" and self.proximal == "exact"


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
