"""Correction of the difference between the policy that is trained and the one that sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import Section

Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CorrectionConfig(Section):
    """Importance weights and rejection of tokens by `pi / beta`: the probability under the policy that is trained (with
    `old_log_prob: rollout` the current one, else the one at the start of the version) over that at sampling.
    """

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights in the loss, of each token or of each response (the product over its tokens). Null has none,
    except with `old_log_prob: decoupled`, whose loss weights tokens."""
    rollout_is_threshold: Above0 | None = 2.0
    """Larger weights are truncated to it; null truncates none."""
    rollout_is_threshold_lower: Above0 | None = None
    """If given, a weight below it or above `rollout_is_threshold` becomes 0 (IcePop) and none is truncated."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step."""
    rollout_rs: Literal["token", "sequence", "geometric"] | None = None
    """Reject by `pi / beta` what is outside of `rollout_rs_threshold_lower` to `rollout_rs_threshold`: `token`, single
    tokens; `sequence`, responses by the product over their tokens; `geometric`, responses by the geometric mean. What
    is rejected is not trained, but counts in the denominator of the loss."""
    rollout_rs_threshold: Above0 = 2.0
    """Largest `pi / beta` that `rollout_rs` keeps."""
    rollout_rs_threshold_lower: Above0 = 0.5
    """Smallest `pi / beta` that `rollout_rs` keeps."""
    veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Reject a response if `pi / beta` of any of its tokens is less."""

    @property
    def rejects(self) -> bool:
        return self.rollout_rs is not None or self.veto_threshold is not None
