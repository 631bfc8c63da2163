"""Policy losses, as pure functions of log-probs.

Every loss is a weighted sum over tokens, divided by the denominator of the whole optimizer step (`step_denominator`).
A mean per call would give the tokens of small micro-batches more weight. A sum over a common denominator gives the
same gradient for every split into micro-batches and ranks.

A loss involves three policies: the *behaviour* policy, which sampled a token; the *proximal* policy, which the trust
region is centred on; and the current policy, which is trained. In PPO the first two are the same. The decoupled
objective separates them, because an old behaviour policy is a bad centre for the trust region:

    r = pi / pi_prox
    objective = pi_prox / pi_behave * min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

Hilton et al. 2021, arXiv:2110.00641; per token of a language model in AReaL, Fu et al. 2025, arXiv:2505.24298,
equation 5. `correction.importance_weights` is the first factor, without gradient; the rest is `ppo_clip`. The other
objectives have `old` in the same place: `algorithm.old_log_prob` says which policy it is.

Shapes: K target tokens of whole rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.train.correction import MAX_LOG_RATIO, Rollouts

Objective = tuple[Tensor, Tensor]
"""`[K]` objectives, and `[K]` bool: whether a clip took the gradient or changed the weight of the token."""


def policy_loss(
    algorithm: AlgorithmConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rollouts: Rollouts,
    *,
    denominator: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`-sum(weight * objective) / denominator` with the objective of `algorithm.loss_mode`.

    Args:
        algorithm: the mode and its settings.
        log_probs: `[K]` of the current policy, with gradient.
        old_log_probs: `[K]` of the policy in the denominator of the ratio, without gradient.
        advantages: `[K]`.
        weights: `[K]`.
        rollouts: of the tokens.
        denominator: of the whole optimizer step.

    Returns:
        The scalar loss, and sums over tokens, which add up over micro-batches and ranks: `tokens`, `ratio`, `clipped`
        and `kl`, the estimate `k3` of KL(old || policy).
    """
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    objective, clipped = objectives(algorithm, log_probs, old_log_probs, log_ratio, advantages, rollouts)
    loss = -(weights * objective).sum() / denominator
    with torch.no_grad():
        ratio = log_ratio.exp()
        sums = {
            "tokens": torch.ones_like(ratio).sum(),
            "ratio": ratio.sum(),
            "clipped": clipped.to(ratio.dtype).sum(),
            "kl": k3(log_ratio).sum(),
        }
    return loss, sums


def objectives(
    algorithm: AlgorithmConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    rollouts: Rollouts,
) -> Objective:
    """The objective of each token by `algorithm.loss_mode`; the arguments are those of `policy_loss`."""
    low, high = algorithm.clip_ratio_low, algorithm.clip_ratio_high
    match algorithm.loss_mode:
        case "ppo_clip":
            return ppo_clip(log_ratio, advantages, low, high, algorithm.dual_clip)
        case "gspo":
            return gspo(log_ratio, advantages, rollouts, low, high)
        case "gspo_token":
            return gspo_token(log_ratio, advantages, rollouts, low, high)
        case "cispo":
            return cispo(log_probs, log_ratio, advantages, low, high)
        case "sapo":
            return sapo(log_ratio, advantages, algorithm.tau_pos, algorithm.tau_neg)
        case "dppo_tv" | "dppo_kl":
            distance = total_variation if algorithm.loss_mode == "dppo_tv" else binary_kl
            return dppo(log_ratio, advantages, distance(log_probs.detach(), old_log_probs), low, high)
        case "icepop":
            return icepop(log_probs, log_ratio, advantages, low, high)
        case "policy_gradient":
            return advantages * log_probs, torch.zeros_like(advantages, dtype=torch.bool)


def ppo_clip(log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None) -> Objective:
    """The clipped surrogate of PPO.

        objective = min(r A, clip(r, 1 - low, 1 + high) A)
        objective = max(objective, dual_clip A)   where A < 0

    First PPO (Schulman et al. 2017, arXiv:1707.06347), then dual clip (Ye et al. 2020, arXiv:1912.09729); `high` above
    `low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).
    """
    ratio = log_ratio.exp()
    plain = ratio * advantages
    objective = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return objective, objective != plain


def gspo(log_ratio: Tensor, advantages: Tensor, rollouts: Rollouts, low: float, high: float) -> Objective:
    """The clipped surrogate of whole sequences; Zheng et al. 2025, arXiv:2507.18071, equation 5.

        s = exp(mean over the sequence of log r);  objective of each token = min(s A, clip(s, 1 - low, 1 + high) A)

    With `aggregation: sequence` the tokens of a sequence add up to the paper's one objective.
    """
    return ppo_clip(rollouts.means(log_ratio)[rollouts.index], advantages, low, high, None)


def gspo_token(log_ratio: Tensor, advantages: Tensor, rollouts: Rollouts, low: float, high: float) -> Objective:
    """GSPO with an advantage for each token: `s_t = sg(s) pi_t / sg(pi_t)`; arXiv:2507.18071, equation 13."""
    of_sequence = rollouts.means(log_ratio.detach())[rollouts.index]
    return ppo_clip(of_sequence + log_ratio - log_ratio.detach(), advantages, low, high, None)


def cispo(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Objective:
    """`sg(clip(r, 1 - low, 1 + high)) A log pi`: no token loses its gradient; MiniMax 2025, arXiv:2506.13585, eq. 4."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - low, 1 + high)
    return weight * advantages * log_probs, weight != ratio


def icepop(log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Objective:
    """`sg(r) A log pi` where r is in [1 - low, 1 + high], 0 elsewhere; IcePop, Ling team 2025, arXiv:2510.18855."""
    ratio = log_ratio.detach().exp()
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    return torch.where(outside, 0.0, ratio) * advantages * log_probs, outside


def sapo(log_ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Objective:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, a soft gate in place of the clip; Gao et al. 2025, arXiv:2511.20347."""
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def dppo(log_ratio: Tensor, advantages: Tensor, distance: Tensor, low: float, high: float) -> Objective:
    """`r A` as long as the token's probability is near the old one; Qi et al. 2026, arXiv:2602.04879.

    Args:
        log_ratio: `[K]`.
        advantages: `[K]`.
        distance: `[K]`, positive where the probability has grown. A token with a positive advantage is left out beyond
            `high`, one with a negative advantage beyond `-low`.
        low: largest distance downwards.
        high: largest distance upwards.
    """
    outside = ((advantages > 0) & (distance > high)) | ((advantages < 0) & (distance < -low))
    return torch.where(outside, 0.0, log_ratio.exp() * advantages), outside


def total_variation(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`[K]`, how much the probability of the token has grown."""
    return log_probs.exp() - old_log_probs.exp()


def binary_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """`[K]`, KL(old || policy) of the token against all others, negative where its probability has fallen."""
    old, new = (p.double().exp().clamp(1e-12, 1 - 1e-12) for p in (old_log_probs, log_probs))
    divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    return torch.where(new < old, -divergence, divergence).to(log_probs.dtype)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(q || p) for x drawn from q: `(r - 1) - log r` with r = p(x) / q(x).

    It is unbiased and never negative.

    http://joschu.net/blog/kl-approx.html
    """
    return torch.expm1(log_ratio) - log_ratio
