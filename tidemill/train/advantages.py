"""Advantages of the rollouts of one optimizer step, per token.

Most estimators compare the rewards of one prompt's rollouts and give every token of a rollout the same advantage. The
others compute with rewards per token: that of the rollout is at its last learned token.

Only tokens with a loss mask of 1 are learned. A token of a tool, or of a version that is too old, is neither in a sum
over time nor in a mean over tokens.

Shapes: N rollouts, of which each has R tokens; L is the largest number of learned tokens of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, Rollout

Float64Array = NDArray[np.float64]
STD_EPS = 1e-6
VARIANCE_EPS = 1e-8


def estimate(
    algorithm: AlgorithmConfig,
    groups: Sequence[Group],
    *,
    reward_weights: Mapping[str, float] | None = None,
) -> list[list[Float32Array]]:
    """The advantages that `algorithm.adv_estimator` names.

    Args:
        algorithm: of the run.
        groups: of the whole optimizer step.
        reward_weights: weight of each reward function, for `gdpo`; a part FUNCTION/PART has that of its function.

    Returns:
        `[R]` for each rollout of each group, 0 at masked tokens.

    Raises:
        DataError: a group without rollouts, or a reward that is not a finite number.
    """
    step = Step(groups)
    match algorithm.adv_estimator:
        case "reinforce":
            tokens = suffix_sums(step.token_rewards(), algorithm.gamma)
        case "reinforce_plus_plus":
            tokens = whiten(suffix_sums(step.token_rewards(), algorithm.gamma), step.learned)
        case "reinforce_plus_plus_baseline":
            tokens = whiten(step.at_tokens(centred(step.rewards, step.starts)), step.learned)
        case "grpo":
            tokens = step.at_tokens(grpo(step.rewards, step.starts, normalize_std=algorithm.normalize_std))
        case "rloo":
            tokens = step.at_tokens(rloo(step.rewards, step.starts))
        case "pass_at_k":
            tokens = step.at_tokens(pass_at_k(step.rewards, step.starts, algorithm.pass_k))
        case "gdpo":
            tokens = step.at_tokens(step.gdpo(reward_weights or {}))
    return step.by_group(tokens)


def rollout_means(groups: Sequence[Group], advantages: Sequence[Sequence[Float32Array]]) -> list[Float32Array]:
    """`[n]` for each group: the mean advantage of a rollout's learned tokens, 0 without any."""
    return [
        np.array([mean(a[r.loss_mask != 0]) for r, a in zip(group.rollouts, of, strict=True)], np.float32)
        for group, of in zip(groups, advantages, strict=True)
    ]


def mean(values: Float32Array) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 0.0


def grpo(rewards: Float64Array, starts: NDArray[np.intp], *, normalize_std: bool) -> Float64Array:
    """How much better each rollout is than the mean of its group.

        A_i = (r_i - mean(r)) / (std(r) + eps)      GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2
        A_i = r_i - mean(r)                         Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2

    The standard deviation is the sample's (divided by n - 1), as in verl, TRL and NeMo-RL.

    Args:
        rewards: `[N]`.
        starts: index of the first rollout of each group.
        normalize_std: divide by the standard deviation.
    """
    difference = centred(rewards, starts)
    if not normalize_std:
        return difference
    sizes = group_sizes(starts, len(rewards))
    variance = np.add.reduceat(difference**2, starts) / np.maximum(sizes - 1, 1)
    advantages: Float64Array = difference / np.repeat(np.sqrt(variance) + STD_EPS, sizes)
    return advantages


def rloo(rewards: Float64Array, starts: NDArray[np.intp]) -> Float64Array:
    """The reward less the mean of the group's other rewards; Ahmadian et al. 2024, arXiv:2402.14740, equation 8.

    A group of one has no other reward: its advantage is 0.
    """
    sizes = group_sizes(starts, len(rewards))
    advantages: Float64Array = centred(rewards, starts) * np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)
    return advantages


def pass_at_k(rewards: Float64Array, starts: NDArray[np.intp], k: int) -> Float64Array:
    """Advantages for the probability that one of k rollouts is right; Chen et al. 2025, arXiv:2508.10751, section 2.4.

        P = 1 - C(w, k) / C(n, k)            w of n rollouts are wrong
        A of a right one = (1 - P) / s       s = sqrt(P (1 - P))
        A of a wrong one = (1 - P - C(w-1, k-1) / C(n-1, k-1)) / s

    A rollout is right if its reward is above 0. All advantages are 0 where s is 0.
    """
    advantages = np.zeros(len(rewards))
    for group in np.split(np.arange(len(rewards)), starts[1:]):
        right = rewards[group] > 0
        n, wrong = len(group), int((~right).sum())
        solved = 1 - comb(wrong, k) / comb(n, k) if n >= k else 0.0
        if deviation := (solved * (1 - solved)) ** 0.5:
            of_wrong = 1 - solved - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)
            advantages[group] = np.where(right, 1 - solved, of_wrong) / deviation
    return advantages


def centred(rewards: Float64Array, starts: NDArray[np.intp]) -> Float64Array:
    """Each reward less the mean of its group.

    Rewards of a group that are all equal give exact zeros, whatever rounding the mean has, so that such a group can be
    left out of training.
    """
    sizes = group_sizes(starts, len(rewards))
    equal = np.maximum.reduceat(rewards, starts) == np.minimum.reduceat(rewards, starts)
    difference: Float64Array = rewards - np.repeat(np.add.reduceat(rewards, starts) / sizes, sizes)
    return np.where(np.repeat(equal, sizes), 0.0, difference)


def group_sizes(starts: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    return np.diff(np.append(starts, count))


def whiten(values: Float64Array, learned: NDArray[np.bool_]) -> Float64Array:
    """Mean 0 and variance 1 over the learned values, with the unbiased variance; a single value stays as it is."""
    drawn = values[learned]
    if len(drawn) < 2:
        return values
    return np.where(learned, (values - drawn.mean()) / np.sqrt(drawn.var(ddof=1) + VARIANCE_EPS), 0.0)


def suffix_sums(values: Float64Array, decay: float) -> Float64Array:
    """`y_t = x_t + decay * y_(t+1)` along the last axis of `[N, L]`."""
    backwards = values[:, ::-1]
    if decay == 1:
        return np.cumsum(backwards, axis=1)[:, ::-1]
    sums: Float64Array = lfilter([1.0], [1.0, -decay], backwards, axis=1)[:, ::-1]
    return sums


def is_finite(rollout: Rollout) -> bool:
    return all(map(math.isfinite, (rollout.reward, *rollout.reward_parts.values())))


class Step:
    """The groups of a step as arrays over rollouts, and over the learned tokens of each from the left.

    Attributes:
        starts: index of the first rollout of each group.
        lengths: `[N]`, learned tokens.
        learned: `[N, L]`, true for them.
        rewards: `[N]`.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """See `estimate`."""
        self.sizes = [len(group.rollouts) for group in groups]
        if not groups or not all(self.sizes):
            raise DataError(f"advantages of groups of {self.sizes} rollouts: each needs at least one")
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.masks = [rollout.loss_mask != 0 for rollout in self.rollouts]
        self.lengths = np.array([np.count_nonzero(mask) for mask in self.masks])
        self.learned = np.arange(self.lengths.max()) < self.lengths[:, None]
        self.rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
        wrong = [group.uid for group in groups if not all(map(is_finite, group.rollouts))]
        if wrong:
            raise DataError(f"prompts {wrong} have rewards that are not finite numbers")

    def token_rewards(self) -> Float64Array:
        """`[N, L]`: the reward of each rollout at its last learned token."""
        result = np.zeros(self.learned.shape)
        some = np.flatnonzero(self.lengths)
        result[some, self.lengths[some] - 1] = self.rewards[some]
        return result

    def gdpo(self, weights: Mapping[str, float]) -> Float64Array:
        """Every part of the reward normalised for itself; GDPO, Liu et al. 2026, arXiv:2601.05242.

            a_i = sum over parts k of weight_k (r_ik - mean_k) / (std_k + eps)
            A_i = a_i / sqrt(variance(a) + eps)

        Mean and standard deviation are those of a group, the variance is over all rollouts of the step. The mean of a
        over the step is 0 and not subtracted, so that a group whose rewards are equal keeps exact zeros.
        """
        total = np.zeros(len(self.rewards))
        for name in sorted({name for rollout in self.rollouts for name in rollout.reward_parts}):
            part = np.array([rollout.reward_parts.get(name, 0.0) for rollout in self.rollouts], np.float64)
            total += weights[name.partition("/")[0]] * grpo(part, self.starts, normalize_std=True)
        variance = np.square(total).sum() / max(len(total) - 1, 1)
        advantages: Float64Array = total / np.sqrt(variance + VARIANCE_EPS)
        return advantages

    def at_tokens(self, advantages: Float64Array) -> Float64Array:
        """`[N, L]` from `[N]`."""
        return np.where(self.learned, advantages[:, None], 0.0)

    def by_group(self, tokens: Float64Array) -> list[list[Float32Array]]:
        """`[R]` for each rollout of each group, from `[N, L]`."""
        arrays: list[Float32Array] = []
        for mask, row, length in zip(self.masks, tokens, self.lengths, strict=True):
            array = np.zeros(len(mask), np.float32)
            array[mask] = row[:length]
            arrays.append(array)
        ends = np.cumsum(self.sizes)
        return [arrays[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]
