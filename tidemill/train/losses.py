"""Policy losses, as pure functions of log-probs.

Every loss is a weighted sum over tokens, divided by the denominator of the whole optimizer step (`step_denominator`).
A mean per call would give the tokens of small micro-batches more weight. A sum over a common denominator gives the
same gradient for every split into micro-batches and ranks.

Shapes: K target tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Beyond this the ratio is clipped anyway, and exp may overflow to an infinity whose gradient is NaN.
MAX_LOG_RATIO = 20.0


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    denominator: float,
    clip_ratio_low: float,
    clip_ratio_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate loss of PPO.

        r = exp(log_prob - old_log_prob)
        objective = min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)
        objective = max(objective, dual_clip A)   where A < 0
        loss = -sum(weight * objective) / denominator

    First PPO (Schulman et al. 2017, arXiv:1707.06347), then dual clip (Ye et al. 2020, arXiv:1912.09729); a larger
    `clip_ratio_high` than `clip_ratio_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).

    Args:
        log_probs: `[K]` of the current policy, with gradient.
        old_log_probs: `[K]` of the policy in the denominator of the ratio, without gradient.
        advantages: `[K]`.
        weights: `[K]`.
        denominator: of the whole optimizer step.
        clip_ratio_low: the ratio is clipped at `1 - clip_ratio_low`.
        clip_ratio_high: the ratio is clipped at `1 + clip_ratio_high`.
        dual_clip: bound of the loss per unit of negative advantage, or None.

    Returns:
        The scalar loss, and sums over tokens, which add up over micro-batches and ranks: `tokens`, `ratio`, `clipped`
        (tokens without a gradient because of a clip) and `kl`, the estimate `k3` of KL(old || policy).
    """
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    loss = -(weights * objective).sum() / denominator
    with torch.no_grad():
        sums = {
            "tokens": torch.ones_like(ratio).sum(),
            "ratio": ratio.sum(),
            "clipped": (objective != plain).to(ratio.dtype).sum(),
            "kl": k3(log_ratio).sum(),
        }
    return loss, sums


def kl_penalty(
    log_probs: Tensor, reference_log_probs: Tensor, weights: Tensor, *, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The k3 estimate of KL(policy || reference), `sum(weight * k3) / denominator`.

    As in GRPO (Shao et al. 2024, arXiv:2402.03300, equation 4); the tokens are treated as samples of the policy.

    Args:
        log_probs: `[K]` of the current policy, with gradient.
        reference_log_probs: `[K]` of the frozen reference policy.
        weights: `[K]`.
        denominator: of the whole optimizer step.

    Returns:
        The scalar, and `reference`, the unweighted sum of the estimates over tokens.
    """
    estimates = k3((reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return (weights * estimates).sum() / denominator, {"reference": estimates.detach().sum()}


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(q || p) for x drawn from q: `(r - 1) - log r` with r = p(x) / q(x).

    It is unbiased and never negative.

    http://joschu.net/blog/kl-approx.html
    """
    return torch.expm1(log_ratio) - log_ratio
