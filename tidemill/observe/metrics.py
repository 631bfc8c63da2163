"""The metrics of a step, and how they are aggregated over steps; `docs/metrics.md` explains every name.

A ratio or mean is always over the items themselves (rollouts, tokens, groups), never an average of averages.

Aggregation example: two steps with 16 and 32 groups and `reward/mean` of 0.2 and 0.5 have together
(16 * 0.2 + 32 * 0.5) / 48 = 0.4. The average of the two values, 0.35, is the mean of no set of rollouts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tidemill.errors import DataError
from tidemill.records import Float32Array, Group, Rollout


def group_metrics(groups: Sequence[Group], version: int, advantages: Sequence[Float32Array]) -> dict[str, float]:
    """Metrics of the groups of one step.

    Args:
        groups: at least one.
        version: policy version of the trainer, from which ages are counted.
        advantages: `[n]` float32 for each group, the mean over the trained tokens of a rollout.

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
    """Rewards over all rollouts; a part that a rollout lacks counts as 0, as in its reward."""
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    flat = sum(bool(np.all(group.rewards == group.rewards[0])) for group in groups)  # float32, as for the advantages
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
    """Mean over all rollouts of every part of the reward that any of them has."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    return {name: float(np.mean([rollout.reward_parts.get(name, 0.0) for rollout in rollouts])) for name in names}


def length_metrics(groups: Sequence[Group], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths of responses (over rollouts) and prompts (over groups), truncation and generation time."""
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
    """Ages of trained tokens, in versions, and rollouts that several versions sampled.

    The age of a group is that of its oldest trained token; the newest one would hide partial rollouts.
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
    """Mean age over trained tokens, from the number that each version sampled; 0 without tokens."""
    together = sum(trained, Counter[int]())
    tokens = together.total()
    return sum((version - sampled) * count for sampled, count in together.items()) / tokens if tokens else 0.0


def advantage_metrics(advantages: Sequence[Float32Array]) -> dict[str, float]:
    """Distribution of the advantages over all rollouts."""
    values = np.concatenate(list(advantages))
    return {
        "advantage/std": float(values.std(dtype=np.float64)),
        "advantage/min": float(values.min()),
        "advantage/max": float(values.max()),
    }


def share(flags: Iterator[bool]) -> float:
    """Fraction of true values; at least one value."""
    return float(np.mean(list(flags)))


Kind = Literal["sum", "last", "max", "min", "mean", "deviation"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How the values of a metric in several steps become one value.

    Attributes:
        kind: `mean` is weighted; `deviation` is the standard deviation over all steps, from those of each step.
        by: the metric that is the weight; None gives every step the weight 1.
        mean: for `deviation`, the metric with the means of the steps; None if they are 0.
        everywhere: for a `mean`, a step without the metric counts as 0; `by` must be a sum.
    """

    kind: Kind
    by: str | None = None
    mean: str | None = None
    everywhere: bool = False


SUM, LAST, MAX, MIN = Rule("sum"), Rule("last"), Rule("max"), Rule("min")
PER_UPDATE = Rule("mean", by="update/count")
PER_GROUP = Rule(
    "mean", by="groups/count"
)  # also for means over rollouts, because all groups of a run have the same size
PER_COUNTED_TOKEN = Rule("mean", by="response/trained_tokens")
PER_TRAINED_TOKEN = Rule("mean", by="update/tokens")
PER_TRAINED_ROLLOUT = Rule("mean", by="update/rollouts")
PER_GENERATED_GROUP = Rule("mean", by="rollout/generated_groups")
OVER_TIME = Rule("mean", by="time/step")

# A word in capitals is a placeholder for any name; an exact name takes precedence.
RULES: Mapping[str, Rule] = {
    "reward/mean": PER_GROUP,
    "reward/std": Rule("deviation", by="groups/count", mean="reward/mean"),
    "reward/min": MIN,
    "reward/max": MAX,
    "reward/PART/mean": Rule("mean", by="groups/count", everywhere=True),
    "groups/count": SUM,
    "groups/zero_variance_ratio": PER_GROUP,
    "advantage/std": Rule("deviation", by="groups/count"),
    "advantage/min": MIN,
    "advantage/max": MAX,
    "response/tokens": SUM,
    "response/trained_tokens": SUM,
    "response/length_mean": PER_GROUP,
    "response/length_min": MIN,
    "response/length_max": MAX,
    "response/truncated_ratio": PER_GROUP,
    "response/seconds_mean": PER_GROUP,
    "response/seconds_max": MAX,
    "prompt/length_mean": PER_GROUP,
    "prompt/length_max": MAX,
    "staleness/mean": PER_GROUP,
    "staleness/max": MAX,
    "staleness/token_mean": PER_COUNTED_TOKEN,
    "staleness/groups_of_age/AGE": SUM,
    "staleness/stale_groups": SUM,
    "staleness/stale_rollouts": SUM,
    "staleness/masked_tokens": SUM,
    "staleness/partial_rollouts": SUM,
    "staleness/partial_ratio": PER_GROUP,
    "staleness/partial_span_max": MAX,
    "loss/policy": PER_UPDATE,
    "loss/grad_norm": PER_UPDATE,
    "loss/learning_rate": LAST,
    "ratio/mean": PER_TRAINED_TOKEN,
    "ratio/clip_fraction": PER_TRAINED_TOKEN,
    "kl/old_new": PER_TRAINED_TOKEN,
    "kl/reference": PER_TRAINED_TOKEN,
    "policy/entropy": PER_TRAINED_TOKEN,
    "correction/old_rollout_gap": PER_TRAINED_TOKEN,
    "correction/kl": PER_TRAINED_TOKEN,
    "correction/k3_kl": PER_TRAINED_TOKEN,
    "correction/chi2_token": PER_TRAINED_TOKEN,
    "correction/chi2_sequence": PER_TRAINED_ROLLOUT,
    "correction/perplexity": PER_TRAINED_ROLLOUT,
    "correction/rollout_perplexity": PER_TRAINED_ROLLOUT,
    "correction/weight_mean": PER_TRAINED_TOKEN,
    "correction/effective_sample_size": PER_UPDATE,
    "correction/rejected_ratio": PER_TRAINED_TOKEN,
    "correction/weight_max": MAX,
    "correction/truncated_ratio": PER_TRAINED_TOKEN,
    "update/count": SUM,
    "update/tokens": SUM,
    "update/rollouts": SUM,
    "update/skipped": SUM,
    "evaluation/score": LAST,
    "evaluation/skipped/REASON": LAST,
    "time/get_groups": SUM,
    "time/advantages": SUM,
    "time/pack": SUM,
    "time/update_actor": SUM,
    "time/forward": SUM,
    "time/backward": SUM,
    "time/optimizer": SUM,
    "time/old_log_prob": SUM,
    "time/sync": SUM,
    "time/sync_export": SUM,
    "time/sync_upload": SUM,
    "time/sync_adopt": SUM,
    "time/sync_canary": SUM,
    "time/evaluate": SUM,
    "time/checkpoint": SUM,
    "time/step": SUM,
    "queue/depth": LAST,
    "queue/capacity": LAST,
    "queue/put": LAST,
    "queue/trained": LAST,
    "queue/dropped": LAST,
    "queue/swept": LAST,
    "queue/oldest_version": LAST,
    "rollout/engines": LAST,
    "rollout/deferred": LAST,
    "rollout/engines_joined": SUM,
    "rollout/engines_removed": SUM,
    "rollout/generating": LAST,
    "rollout/scoring": LAST,
    "rollout/delivering": LAST,
    "rollout/generated_groups": SUM,
    "rollout/generated_tokens": SUM,
    "rollout/wasted_tokens": SUM,
    "rollout/updated_midway": SUM,
    "rollout/reward/mean": PER_GENERATED_GROUP,
    "rollout/reward/std_in_group": PER_GENERATED_GROUP,
    "rollout/reward/PART": Rule("mean", by="rollout/generated_groups", everywhere=True),
    "rollout/response_length/mean": PER_GENERATED_GROUP,
    "rollout/truncated": PER_GENERATED_GROUP,
    "rollout/group_seconds/mean": PER_GENERATED_GROUP,
    "rollout/failed/REASON": SUM,
    "rollout/dropped/REASON": SUM,
    "rollout/cancelled/REASON": SUM,
    "rollout/skipped/REASON": SUM,
    "ledger/issued": LAST,
    "ledger/trained": LAST,
    "ledger/quarantined": LAST,
    "ledger/dispatched": LAST,
    "ledger/queued": LAST,
    "ledger/waiting": LAST,
    "ledger/dropped/REASON": LAST,
    "sync/bytes": LAST,
    "sync/stored_bytes": SUM,
    "sync/full": SUM,
    "sync/canary_gap": MAX,
    "idle/trainer": OVER_TIME,
    "idle/rollouter": OVER_TIME,
    "throughput/tokens_per_second": OVER_TIME,
}


@dataclass(slots=True)
class Column:
    """Running statistics of one metric; `total` and `squares` are weighted sums."""

    last: float = math.nan
    largest: float = -math.inf
    smallest: float = math.inf
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.last = value
        self.largest, self.smallest = max(self.largest, value), min(self.smallest, value)
        self.weight += weight
        self.total += weight * value
        self.squares += weight * value * value


class MetricsAggregator:
    """Aggregates the metrics of steps by `RULES`.

    A metric that only some steps report (evaluation, checkpoint) is aggregated over those steps, unless its rule says
    `everywhere`.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add one step.

        Raises:
            DataError: a metric has no rule, or the step lacks its weight.
        """
        for name, value in metrics.items():
            by = rule_of(name).by
            if by is not None and by not in metrics:
                raise DataError(f"metric {name} is weighted by {by}, which the step does not report; report both")
            self._columns.setdefault(name, Column()).add(value, 1.0 if by is None else metrics[by])

    def result(self) -> dict[str, float]:
        """Every metric over all steps so far, without means whose total weight is 0."""
        taken = {name: self._take(rule_of(name), column) for name, column in self._columns.items()}
        return {name: value for name, value in taken.items() if value is not None}

    def _take(self, rule: Rule, column: Column) -> float | None:
        if rule.kind in ("mean", "deviation") and not column.weight:
            return None
        match rule.kind:
            case "sum":
                return column.total
            case "last":
                return column.last
            case "max":
                return column.largest
            case "min":
                return column.smallest
            case "mean":
                return column.total / self._weight(rule, column)
            case "deviation":
                means = Column() if rule.mean is None else self._columns[rule.mean]
                return deviation(column, means)

    def _weight(self, rule: Rule, column: Column) -> float:
        return self._columns[rule.by].total if rule.everywhere and rule.by is not None else column.weight


def aggregate(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several reports as one. Of a mean whose total weight is 0, the last value is kept."""
    if len(reports) == 1:
        return dict(reports[0])
    aggregator = MetricsAggregator()
    for report in reports:
        aggregator.add(report)
    return {**(reports[-1] if reports else {}), **aggregator.result()}


def deviation(deviations: Column, means: Column) -> float:
    """Standard deviation by the law of total variance: mean variance plus variance of the means."""
    weight = deviations.weight
    variance_of_means = means.squares / weight - (means.total / weight) ** 2
    return math.sqrt(max(0.0, deviations.squares / weight + variance_of_means))


def rule_of(name: str) -> Rule:
    """The rule of a metric.

    Raises:
        DataError: the metric has no rule.
    """
    if name in RULES:
        return RULES[name]
    for pattern, rule in RULES.items():
        # A reward function that returns several numbers has parts named FUNCTION/PART.
        if re.fullmatch(re.sub("[A-Z]+", ".+", pattern), name):
            return rule
    raise DataError(f"metric {name} has no aggregation rule; add one to RULES in observe/metrics.py")
