"""Numbers of a run, from its records; `docs/metrics.md` explains every name.

A ratio or mean is always over the things themselves (rollouts, tokens, groups), never an average of averages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, Rollout


def group_metrics(groups: Sequence[Group], version: int, advantages: Sequence[Float32Array]) -> dict[str, float]:
    """Describe the groups of one step.

    Args:
        groups: at least one.
        version: policy version that they are trained at; ages are counted from it.
        advantages: `[n]` float32 for each group.

    Raises:
        DataError: no groups, a group without rollouts, or not one advantage per rollout.
    """
    if not groups or not all(group.rollouts for group in groups):
        raise DataError(
            f"metrics of {len(groups)} groups of {[len(g.rollouts) for g in groups]} rollouts: none is empty"
        )
    if [len(group.rollouts) for group in groups] != [len(advantage) for advantage in advantages]:
        raise DataError(f"{[len(a) for a in advantages]} advantages for {[len(g.rollouts) for g in groups]} rollouts")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        **reward_metrics(groups, rollouts),
        **length_metrics(groups, rollouts),
        **staleness_metrics(groups, rollouts, version),
        **advantage_metrics(advantages),
    }


def reward_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards over all rollouts; a part that a rollout lacks counts as 0, which is what it adds to the reward."""
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    flat = sum(bool(np.all(group.rewards == group.rewards[0])) for group in groups)  # in the precision of advantages
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **{f"reward/{name}/mean": mean for name, mean in part_means(rollouts).items()},
        "groups/count": float(len(groups)),
        "groups/zero_variance_ratio": flat / len(groups),
    }


def part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of every part of the reward that any of these rollouts has, over all of them."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    return {name: float(np.mean([rollout.reward_parts.get(name, 0.0) for rollout in rollouts])) for name in names}


def length_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Tokens of responses (over rollouts) and of prompts (over groups), and how responses ended."""
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    prompts = np.array([len(group.prompt.token_ids) for group in groups])
    seconds = np.array([rollout.seconds for rollout in rollouts])
    return {
        "response/tokens": float(lengths.sum()),
        "response/trained_tokens": float(sum(group.trained_tokens for group in groups)),
        "response/length_mean": float(lengths.mean()),
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
        "response/truncated_ratio": share(rollout.finish_reason == "length" for rollout in rollouts),
        "response/seconds_mean": float(seconds.mean()),
        "response/seconds_max": float(seconds.max()),
        "prompt/length_mean": float(prompts.mean()),
        "prompt/length_max": float(prompts.max()),
    }


def staleness_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Ages in versions, of the tokens that the loss counts, and how many versions sampled a rollout.

    A group is as old as the oldest of them: judging by the newest hides partial rollouts.
    """
    ages = np.array([group.age(version) for group in groups])
    trained = [rollout.trained_by_version for rollout in rollouts]
    versions = [[span.version for span in rollout.versions] or [version] for rollout in rollouts]
    oldest, newest = np.array([min(v) for v in versions]), np.array([max(v) for v in versions])
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/token_mean": token_age(trained, version),
        **{f"staleness/groups_of_age/{age}": float((ages == age).sum()) for age in range(int(ages.max()) + 1)},
        "staleness/stale_groups": float((ages > 0).sum()),
        "staleness/stale_rollouts": float(sum(min(v, default=version) < version for v in trained)),
        "staleness/partial_rollouts": float((oldest < newest).sum()),
        "staleness/partial_ratio": float((oldest < newest).mean()),
        "staleness/partial_span_max": float((newest - oldest).max()),
    }


def token_age(trained: Sequence[Counter[int]], version: int) -> float:
    """Mean age over the tokens that the loss counts, from how many each version sampled; 0 where there are none."""
    together = sum(trained, Counter[int]())
    tokens = together.total()
    return sum((version - sampled) * count for sampled, count in together.items()) / tokens if tokens else 0.0


def advantage_metrics(advantages: Sequence[Float32Array]) -> dict[str, float]:
    """Spread of the advantages over all rollouts."""
    values = np.concatenate(list(advantages))
    return {
        "advantage/std": float(values.std(dtype=np.float64)),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


def share(flags: Iterator[bool]) -> float:
    """Fraction of true values; of at least one."""
    return float(np.mean(list(flags)))
