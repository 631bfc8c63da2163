"""Corrections for tokens that another policy sampled, as pure functions of log-probs.

Three policies meet in a loss: the *behaviour* policy that sampled a token, the *proximal* policy that the present one
is kept close to, and the present one, which is trained. PPO takes the first two to be the same; the decoupled objective
keeps them apart, because what was sampled long ago is a bad place to stay close to:

    r = pi / pi_prox
    objective = pi_prox / pi_behave * min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

Hilton et al. 2021, arXiv:2110.00641; per token of a language model in AReaL, Fu et al. 2025,
arXiv:2505.24298, equation 5. The first factor is computed here, and no gradient flows through it; the rest is
`losses.ppo_clip`.

Shapes: K target tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.train.losses import MAX_LOG_RATIO


def behaviour_weights(proximal: Tensor, behaviour: Tensor, cap: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance weights of the proximal policy for tokens of the behaviour policy.

        w = min(pi_prox / pi_behave, cap)

    Truncation bounds the variance at the price of a bias towards the behaviour policy (Ionides 2008,
    doi:10.1198/106186008X320456; for policies Espeholt et al. 2018, arXiv:1802.01561, section 4).

    Args:
        proximal: `[K]` log-probs, without gradient.
        behaviour: `[K]` log-probs at sampling.
        cap: largest weight, or None.

    Returns:
        `[K]` weights; and over tokens the sums `weight` and `truncated`, and the largest weight before truncation,
        `weight_max`.
    """
    exact = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = exact if cap is None else exact.clamp(max=cap)
    sums = {"weight": weights.sum(), "truncated": (weights != exact).to(exact.dtype).sum(), "weight_max": exact.max()}
    return weights, sums


def log_linear(present: Tensor, behaviour: Tensor, versions: Tensor, *, version: int, done: float) -> Tensor:
    """The proximal log-probs by interpolation instead of a forward pass.

        log pi_prox = log pi_behave + a (log pi - log pi_behave)
        a = (v_prox - v_behave) / (v - v_behave)

    A-3PO, Li et al. 2025, arXiv:2512.06547, as in AReaL. There the proximal policy always is one version
    behind. Here it is what a version began with, and the present policy is a share `done` of a version further:
    v_prox = `version`, v = `version + done`. So the first step of a version, where the two are the same, is exact, and
    the formula of the paper is the limit at the version's end. It is exact throughout if log-probs change by the same
    amount every step.

    Args:
        present: `[K]` log-probs of the policy that is trained, without gradient.
        behaviour: `[K]` log-probs at sampling.
        versions: `[K]` integer, which policy version sampled each token; none is above `version`.
        version: that is being trained.
        done: share of its optimizer steps that are done, 0 at the first.
    """
    if done == 0:
        return present
    age = (version - versions).to(present.dtype)
    return torch.lerp(behaviour, present, age / (age + done))
