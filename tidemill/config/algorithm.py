"""How the policy learns from rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tidemill.config.correction import Above0, CorrectionConfig
from tidemill.config.presets import with_preset
from tidemill.config.section import Fraction, NonNegative, Number, Section

OldLogProb = Literal["rollout", "version_start", "decoupled"]
LossMode = Literal["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "dppo_tv", "dppo_kl", "policy_gradient", "icepop"]
KlLossType = Literal["k2", "k3", "k3+", "k3_weighted"]
Preset = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "icepop", "rloo", "reinforce_pp",
    "reinforce_pp_baseline", "pass_at_k", "gdpo", "areal",
]  # fmt: skip
AdvEstimator = Literal[
    "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "pass_at_k", "gdpo"
]
COMPARED: tuple[AdvEstimator, ...] = ("grpo", "rloo", "reinforce_plus_plus_baseline", "pass_at_k", "gdpo")
"""Estimators that compare the rollouts of a group."""
DISCOUNTED: tuple[AdvEstimator, ...] = ("reinforce", "reinforce_plus_plus")
"""Estimators over time."""


class AlgorithmConfig(Section):
    """How advantages follow from rewards, and the loss. The defaults are those of GRPO (Shao et al. 2024,
    arXiv:2402.03300) without a KL term, with the clipped surrogate loss of PPO (Schulman et al. 2017,
    arXiv:1707.06347).
    """

    preset: Preset | None = None
    """Values of a published algorithm for the settings of this section that are left out; `docs/algorithms.md` lists
    them, and the resolved settings of the run show them."""
    adv_estimator: AdvEstimator = "grpo"
    """How advantages follow from rewards; `docs/algorithms.md` has the formulas. `grpo`, `rloo` and `pass_at_k` compare
    the rollouts of a prompt, `gdpo` each reward function for itself; `reinforce` and `reinforce_plus_plus` take the
    discounted reward to go, the second one whitened over the step; `reinforce_plus_plus_baseline` whitens what is left
    after the group's mean."""
    normalize_std: bool = True
    """Divide the advantages of `grpo` by the group's standard deviation; false is Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783)."""
    pass_k: Annotated[int, Field(ge=2)] = 4
    """The k of `pass_at_k`, at most `rollout.group_size`."""
    gamma: Fraction = 1.0
    """Discount of later rewards, of `reinforce` and `reinforce_plus_plus`."""
    loss_mode: LossMode = "ppo_clip"
    """The policy loss; `docs/algorithms.md` has the formulas. `ppo_clip` clips the ratio of each token, `gspo` and
    `gspo_token` that of each response; `cispo` and `icepop` weight the policy gradient by the clipped or masked ratio;
    `sapo` replaces the clip by a soft gate, `dppo_tv` and `dppo_kl` by a bound of the change in probability;
    `policy_gradient` has neither a ratio nor a clip."""
    clip_ratio_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_ratio_low. For `dppo_tv` and `dppo_kl`, the largest distance downwards."""
    clip_ratio_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """The ratio is clipped above at 1 + clip_ratio_high; a larger value than clip_ratio_low is DAPO's clip-higher. For
    `dppo_tv` and `dppo_kl`, the largest distance upwards."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 3.0
    """Bound of the loss of `ppo_clip` for negative advantages (Ye et al. 2020, arXiv:1912.09729); null leaves it
    out."""
    tau_pos: Above0 = 1.0
    """Steepness of the gate of `sapo` for positive advantages."""
    tau_neg: Above0 = 1.05
    """Steepness of the gate of `sapo` for other advantages."""
    entropy_coef: Number = 0.0
    """Weight of the policy's entropy, which is added to the objective; with the same denominator as the loss."""
    kl_loss_coef: NonNegative = 0.0
    """Weight of the estimate of KL(policy || reference) in the loss; above 0 a frozen copy of the first policy is
    kept."""
    kl_loss_type: KlLossType = "k3+"
    """The estimate. `k2`, `k3+` (the value of k3 with the gradient of k2) and `k3_weighted` (k3 times the probability
    over that at sampling) have the gradient of the divergence in expectation; `k3`, as in GRPO, has that of the reverse
    divergence."""
    aggregation: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """What the loss is divided by, over the whole optimizer step: `token`, its response tokens; `sequence`, its
    responses, each with the mean over its tokens; `sequence_sum`, its responses, each with the sum over its tokens;
    `constant`, its responses times `rollout.max_new_tokens` (Dr. GRPO)."""
    old_log_prob: OldLogProb = "rollout"
    """Denominator of the ratio in the loss: `rollout`, the engine's log-probs at sampling; `version_start`, those of
    the parameters at the start of the current version (verl's MIS); `decoupled`, those of the proximal policy, and the
    loss is weighted by proximal over sampling probability (Fu et al. 2025, arXiv:2505.24298, equation 5)."""
    proximal: Literal["exact", "loglinear"] = "exact"
    """Log-probs of the proximal policy of `old_log_prob: decoupled`: `exact`, by a forward pass of the parameters at
    the start of the version; `loglinear`, interpolated between those at sampling and the current ones by the token's
    version (Li et al. 2025, arXiv:2512.06547), without that pass and without a second copy of the parameters."""
    rollout_correction: CorrectionConfig = Field(default_factory=CorrectionConfig)

    @model_validator(mode="before")
    @classmethod
    def fill_in_preset(cls, settings: Any) -> Any:
        return with_preset(settings) if isinstance(settings, dict) else settings

    @property
    def importance_sampling(self) -> Literal["token", "sequence"] | None:
        """What has an importance weight; the decoupled loss is defined with that of tokens."""
        return self.rollout_correction.rollout_is or ("token" if self.old_log_prob == "decoupled" else None)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether also tokens without an advantage take part in an optimizer step."""
        normalized = self.rollout_correction.rollout_is_batch_normalize
        return self.kl_loss_coef > 0 or self.entropy_coef != 0 or normalized

    @property
    def corrects(self) -> bool:
        """Whether tokens have importance weights or may be rejected."""
        return self.importance_sampling is not None or self.rollout_correction.rejects

    @property
    def keeps_version_start(self) -> bool:
        """Whether steps after the first of a version need the parameters at its start."""
        return self.old_log_prob != "rollout" and self.proximal == "exact"
