"""The divergence of the policy from the reference policy, as a term of the loss.

With d = log pi - log ref and tokens sampled by pi, the estimators k1 = d, k2 = d^2 / 2 and k3 = exp(-d) - 1 + d have
other gradients than values: that of k1 has mean 0, that of k2 is the gradient of KL(pi || ref), and that of k3 is the
gradient of KL(ref || pi). http://joschu.net/blog/kl-approx.html; Tang and Munos 2025, arXiv:2506.09477.

Shapes: K target tokens.
"""

from __future__ import annotations

from torch import Tensor

from tidemill.config.algorithm import KlLossType
from tidemill.train.correction import MAX_LOG_RATIO, exp
from tidemill.train.losses import k3


def kl_loss(
    kind: KlLossType,
    log_probs: Tensor,
    reference_log_probs: Tensor,
    sampled: Tensor,
    weights: Tensor,
    *,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL term, `sum(weight * estimate) / denominator`.

        k3           k3
        k2           w k2              w = sg(pi / beta): beta sampled the tokens, not pi
        k3+          w (k2 - sg(k2) + sg(k3)): value of k3, gradient of k2
        k3_weighted  (pi / beta) k3, with the gradient of both factors; DeepSeek-AI 2025, arXiv:2512.02556

    All but `k3` have the gradient of KL(pi || ref) in expectation. `k3` is that of GRPO (Shao et al. 2024,
    arXiv:2402.03300, equation 4).

    Args:
        kind: of the estimator.
        log_probs: `[K]` of the current policy, with gradient.
        reference_log_probs: `[K]` of the frozen reference policy.
        sampled: `[K]` at sampling, without gradient.
        weights: `[K]`.
        denominator: of the whole optimizer step.

    Returns:
        The scalar, and `reference`, the unweighted sum of the k3 estimates over tokens.
    """
    distance = (log_probs - reference_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value, square = k3(-distance), distance**2 / 2
    ratio = exp(log_probs - sampled)
    match kind:
        case "k3":
            estimates = value
        case "k2":
            estimates = ratio.detach() * square
        case "k3+":
            estimates = ratio.detach() * (square - square.detach() + value.detach())
        case "k3_weighted":
            estimates = ratio * value
    return (weights * estimates).sum() / denominator, {"reference": value.detach().sum()}
