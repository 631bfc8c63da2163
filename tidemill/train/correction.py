"""Rollout correction: weights, rejection and diagnostics by `pi / beta`, and the interpolated proximal policy.

beta sampled a token; pi is the policy that is trained, or the proximal one that stands for it. Nothing here has a
gradient. A rejected token has weight 0 and counts in the denominator of the loss, so the loss is an estimate of the
masked objective and stays finite.

Shapes: K target tokens of whole rollouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.config.algorithm import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""exp of more may overflow to an infinity, whose gradient is NaN."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Which of the K tokens belong to the same rollout.

    Attributes:
        index: `[K]` int64, from 0 to the number of rollouts.
        lengths: `[rollouts]` float32, tokens of each.
    """

    index: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rollout: Tensor) -> Rollouts:
        """From `[K]` integers that are equal for the tokens of a rollout."""
        _, index, counts = torch.unique(rollout, return_inverse=True, return_counts=True)
        return cls(index, counts.float())

    def sums(self, values: Tensor) -> Tensor:
        """`[rollouts]` from `[K]`, with gradient."""
        return torch.zeros_like(self.lengths).index_add(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        """`[rollouts]` from `[K]`, with gradient."""
        return self.sums(values) / self.lengths


def exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_weights(algorithm: AlgorithmConfig, log_ratio: Tensor, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Truncated or masked importance weights.

        token     w_t = f(pi_t / beta_t)
        sequence  w_t = f(product over the rollout of pi / beta)
        f(w) = min(w, high)                    truncated, Ionides 2008, doi:10.1198/106186008X320456
        f(w) = w if low <= w <= high else 0    masked: IcePop, Ling team 2025, arXiv:2510.18855

    Args:
        algorithm: with `importance_sampling` and the thresholds.
        log_ratio: `[K]`, log pi - log beta.
        rollouts: of the tokens.

    Returns:
        `[K]` weights, and `[K]` before truncation or masking; both 1 without importance sampling.
    """
    correction = algorithm.rollout_correction
    low, high = correction.rollout_is_threshold_lower, correction.rollout_is_threshold or math.inf
    match algorithm.importance_sampling:
        case "token":
            exact = exp(log_ratio)
        case "sequence":
            exact = exp(rollouts.sums(log_ratio))[rollouts.index]
        case None:
            return torch.ones_like(log_ratio), torch.ones_like(log_ratio)
    if low is None:
        return exact.clamp(max=high), exact
    return torch.where((exact >= low) & (exact <= high), exact, 0.0), exact


def kept(algorithm: AlgorithmConfig, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """`[K]` float32, 0 for a token that is rejected and 1 for the others (masked importance sampling, MIS).

    Args:
        algorithm: with `rollout_correction`.
        log_ratio: `[K]`, log pi - log beta.
        rollouts: of the tokens.
    """
    correction = algorithm.rollout_correction
    low, high = math.log(correction.rollout_rs_threshold_lower), math.log(correction.rollout_rs_threshold)
    match correction.rollout_rs:
        case "token":
            statistic = log_ratio
        case "sequence":
            statistic = rollouts.sums(log_ratio)[rollouts.index]
        case "geometric":
            statistic = rollouts.means(log_ratio)[rollouts.index]
        case None:
            statistic = torch.full_like(log_ratio, (low + high) / 2)
    keep: Tensor = ((statistic >= low) & (statistic <= high)).float()
    if correction.veto_threshold is not None:
        unlikely = (exp(log_ratio) < correction.veto_threshold).float()
        keep = keep * (rollouts.sums(unlikely) == 0).float()[rollouts.index]
    return keep


def weight_sums(algorithm: AlgorithmConfig, log_ratio: Tensor, rollouts: Rollouts) -> Tensor:
    """`[2]`: the sum of the importance weights and their number, over tokens or over rollouts; for their mean."""
    weights, _ = importance_weights(algorithm, log_ratio, rollouts)
    if algorithm.importance_sampling == "sequence":
        weights = rollouts.means(weights)
    return torch.stack([weights.sum(), torch.tensor(float(len(weights)), device=weights.device)])


def correct(
    algorithm: AlgorithmConfig, log_ratio: Tensor, rollouts: Rollouts, mean_weight: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The factor of each token in the loss, and sums for the metrics `correction/*`.

    Args:
        algorithm: with `rollout_correction`.
        log_ratio: `[K]`, log pi - log beta.
        rollouts: of the tokens.
        mean_weight: of the whole step, for `rollout_is_batch_normalize`.

    Returns:
        `[K]` factors; sums over tokens, and `weight_max`, the largest weight before truncation.
    """
    weights, exact = importance_weights(algorithm, log_ratio, rollouts)
    weights, truncated = weights / mean_weight, weights != exact
    factors = weights * kept(algorithm, log_ratio, rollouts) if algorithm.rollout_correction.rejects else weights
    return factors, {
        "weight": weights.sum(),
        "weight_squares": (weights**2).sum(),
        "truncated": truncated.float().sum(),
        "rejected": (factors == 0).float().sum(),
        "weight_max": exact.max(),
    }


def diagnostics(log_ratio: Tensor, sampled: Tensor, rollouts: Rollouts) -> dict[str, Tensor]:
    """Sums for the distance between pi and beta, over tokens and over rollouts.

    Args:
        log_ratio: `[K]`, log pi - log beta.
        sampled: `[K]`, log beta.
        rollouts: of the tokens.
    """
    ratio, of_rollouts = exp(log_ratio), rollouts.sums(log_ratio)
    perplexity, sampled_perplexity = (exp(-rollouts.means(p)) for p in (sampled + log_ratio, sampled))
    return {
        "gap": log_ratio.abs().sum(),
        "kl_rollout": -log_ratio.sum(),
        "k3_rollout": (ratio - 1 - log_ratio).sum(),
        "chi2_token": (exp(2 * log_ratio)).sum(),
        "rollouts": rollouts.lengths.new_tensor(float(len(rollouts.lengths))),
        "chi2_sequence": exp(2 * of_rollouts).sum(),
        "perplexity": perplexity.sum(),
        "perplexity_rollout": sampled_perplexity.sum(),
    }


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
