"""How the policy learns from rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import NonNegative, Section

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
