"""Policy losses and off-policy corrections, as pure functions of log-probs.

Every loss is a weighted sum over tokens, divided by the denominator of the whole optimizer step (`step_denominator`).
A mean per call would give the tokens of small micro-batches more weight. A sum over a common denominator gives the
same gradient for every split into micro-batches and ranks.

A loss involves three policies: the *behaviour* policy, which sampled a token; the *proximal* policy, which the trust
region is centred on; and the current policy, which is trained. In PPO the first two are the same. The decoupled
objective separates them, because an old behaviour policy is a bad centre for the trust region:

    r = pi / pi_prox
    objective = pi_prox / pi_behave * min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

Hilton et al. 2021, arXiv:2110.00641; per token of a language model in AReaL, Fu et al. 2025, arXiv:2505.24298,
equation 5. `behaviour_weights` is the first factor, without gradient; the rest is `ppo_clip`.

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


def behaviour_weights(proximal: Tensor, behaviour: Tensor, cap: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance weights of the proximal over the behaviour policy.

        w = min(pi_prox / pi_behave, cap)

    Truncation bounds the variance and adds a bias towards the behaviour policy (Ionides 2008,
    doi:10.1198/106186008X320456; for policies Espeholt et al. 2018, arXiv:1802.01561, section 4).

    Args:
        proximal: `[K]` log-probs, without gradient.
        behaviour: `[K]` log-probs at sampling.
        cap: largest weight, or None.

    Returns:
        `[K]` weights; the sums over tokens `weight` and `truncated`; and `weight_max`, the largest weight before
        truncation.
    """
    exact = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = exact if cap is None else exact.clamp(max=cap)
    sums = {"weight": weights.sum(), "truncated": (weights != exact).to(exact.dtype).sum(), "weight_max": exact.max()}
    return weights, sums


def log_linear(current: Tensor, behaviour: Tensor, versions: Tensor, *, version: int, done: float) -> Tensor:
    """Proximal log-probs by interpolation instead of a forward pass.

        log pi_prox = log pi_behave + a (log pi - log pi_behave)
        a = (v_prox - v_behave) / (v - v_behave)

    A-3PO, Li et al. 2025, arXiv:2512.06547, as in AReaL, where the proximal policy is always one version behind. Here
    it is the start of the version, and the current policy is a share `done` of a version ahead of it: v_prox =
    `version`, v = `version + done`. The first step of a version, where the two are equal, is exact, and the formula of
    the paper is the limit at the version's end. All steps are exact if log-probs change by the same amount in each.

    Args:
        current: `[K]` log-probs of the current policy, without gradient.
        behaviour: `[K]` log-probs at sampling.
        versions: `[K]` integer, the policy version that sampled each token, at most `version`.
        version: that is trained.
        done: share of its optimizer steps that are done, 0 at the first one.
    """
    if done == 0:
        return current
    age = (version - versions).to(current.dtype)
    return torch.lerp(behaviour, current, age / (age + done))
