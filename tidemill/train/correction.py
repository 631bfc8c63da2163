"""Off-policy corrections, as pure functions of log-probs.

A loss involves three policies: the *behaviour* policy, which sampled a token; the *proximal* policy, which the trust
region is centred on; and the current policy, which is trained. In PPO the first two are the same. The decoupled
objective separates them, because an old behaviour policy is a bad centre for the trust region:

    r = pi / pi_prox
    objective = pi_prox / pi_behave * min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

Hilton et al. 2021, arXiv:2110.00641; per token of a language model in AReaL, Fu et al. 2025,
arXiv:2505.24298, equation 5. The first factor is computed here, without gradient; the rest is `losses.ppo_clip`.

Shapes: K target tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.train.losses import MAX_LOG_RATIO


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
