"""Group-relative advantages."""

from __future__ import annotations

import numpy as np

from tidemill.records import Float32Array


def grpo_advantages(rewards: Float32Array, normalize_std: bool, eps: float = 1e-6) -> Float32Array:
    """How much better each rollout of one group is than the group's mean.

        A_i = (r_i - mean(r)) / (std(r) + eps)      GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2
        A_i = r_i - mean(r)                         Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2

    The standard deviation is the population's (divided by n). Rewards that are all equal give exact zeros, whatever
    rounding the mean has, so that such a group can be left out of training.

    Args:
        rewards: `[n]` float32, the rewards of one group.
        normalize_std: divide by the standard deviation.
        eps: keeps the division finite.

    Returns:
        `[n]` float32.
    """
    if len(rewards) == 0 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards), np.float32)
    exact = rewards.astype(np.float64)
    centred = exact - exact.mean()
    advantages: Float32Array = (centred / (exact.std() + eps) if normalize_std else centred).astype(np.float32)
    return advantages
