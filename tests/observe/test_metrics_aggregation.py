"""Aggregated steps, against the same metrics computed from all groups at once."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tidemill.errors import DataError
from tidemill.observe.metrics import RULES, MetricsAggregator, group_metrics, rule_of
from tidemill.records import Group, Prompt, Rollout, VersionSpan

DOCS = Path(__file__).parents[2] / "docs/metrics.md"

SUMS = """
groups/count response/tokens response/trained_tokens staleness/groups_of_age/AGE staleness/stale_groups
staleness/stale_rollouts staleness/masked_tokens staleness/partial_rollouts update/count update/tokens update/skipped
sync/stored_bytes sync/full rollout/engines_joined
update/rollouts rollout/engines_removed rollout/generated_groups rollout/generated_tokens rollout/wasted_tokens
rollout/updated_midway
rollout/failed/REASON rollout/dropped/REASON rollout/cancelled/REASON rollout/skipped/REASON
"""
LASTS = """
loss/learning_rate evaluation/score evaluation/skipped/REASON rollout/engines rollout/deferred rollout/generating
rollout/scoring rollout/delivering sync/bytes
"""
LARGEST = """
reward/max advantage/max response/length_max response/seconds_max prompt/length_max staleness/max
staleness/partial_span_max correction/weight_max sync/canary_gap
"""
OF_GROUPS = """
reward/mean reward/PART/mean groups/zero_variance_ratio response/length_mean response/truncated_ratio
response/seconds_mean prompt/length_mean staleness/mean staleness/partial_ratio
"""
OF_TOKENS = """
ratio/mean ratio/clip_fraction kl/old_new kl/reference policy/entropy correction/old_rollout_gap
correction/weight_mean correction/truncated_ratio correction/rejected_ratio correction/kl correction/k3_kl
correction/chi2_token
"""
OF_GENERATED = """
rollout/reward/mean rollout/reward/std_in_group rollout/reward/PART rollout/response_length/mean rollout/truncated
rollout/group_seconds/mean
"""


def together(*steps: dict[str, float]) -> dict[str, float]:
    aggregator = MetricsAggregator()
    for step in steps:
        aggregator.add(step)
    return aggregator.result()


def random_group(random: np.random.Generator) -> Group:
    rollouts = []
    for _ in range(4):
        length, reward = int(random.integers(1, 9)), float(random.integers(0, 3))
        versions = (VersionSpan(int(random.integers(0, 4)), 0, length),)
        ids, values, mask = np.zeros(length, np.int32), np.zeros(length, np.float32), random.integers(0, 2, length)
        mask, parts = mask.astype(np.float32), {"exact": reward}
        rollouts.append(Rollout(ids, values, mask, versions, "length", "", reward, parts, float(length)))
    return Group(Prompt(0, 0, np.zeros(int(random.integers(1, 9)), np.int32), ""), tuple(rollouts))


def test_aggregated_steps_equal_the_metrics_of_all_their_groups() -> None:
    random = np.random.default_rng(0)
    groups = [random_group(random) for _ in range(12)]
    advantages = [group.rewards - group.rewards.mean() for group in groups]
    parts = [slice(0, 2), slice(2, 5), slice(5, 12)]
    steps = [group_metrics(groups[part], 4, advantages[part]) for part in parts]
    assert together(*steps) == pytest.approx(group_metrics(groups, 4, advantages), rel=1e-6)


def test_sums_last_values_and_extremes_worked_by_hand() -> None:
    steps = [
        {"update/skipped": 1.0, "loss/learning_rate": 0.1, "sync/canary_gap": 0.3, "time/sync": 2.0, "queue/put": 8.0},
        {"update/skipped": 0.0, "loss/learning_rate": 0.2, "sync/canary_gap": 0.1, "time/sync": 1.0, "queue/put": 9.0},
    ]
    assert together(*steps) == {
        "update/skipped": 1.0,
        "loss/learning_rate": 0.2,
        "sync/canary_gap": 0.3,
        "time/sync": 3.0,
        "queue/put": 9.0,
    }


def test_shares_of_time_and_rates_are_weighted_by_time() -> None:
    # 1 s of 2 s and 1 s of 8 s waiting: 2 s of 10 s; 20 tokens in 2 s and 160 tokens in 8 s: 180 tokens in 10 s
    one = {"time/step": 2.0, "idle/trainer": 0.5, "throughput/tokens_per_second": 10.0}
    two = {"time/step": 8.0, "idle/trainer": 0.125, "throughput/tokens_per_second": 20.0}
    result = together(one, two)
    assert result["idle/trainer"] == pytest.approx(0.2)
    assert result["throughput/tokens_per_second"] == pytest.approx(18.0)


def test_a_metric_of_some_steps_is_aggregated_over_those_steps() -> None:
    one = {"rollout/generated_groups": 0.0}
    two = {"rollout/generated_groups": 3.0, "rollout/reward/exact": 0.5, "rollout/dropped/stale": 2.0}
    assert together(one, two) == {
        "rollout/generated_groups": 3.0,
        "rollout/reward/exact": 0.5,
        "rollout/dropped/stale": 2.0,
    }


def test_a_part_of_the_reward_counts_as_zero_in_steps_that_lack_it() -> None:
    steps = [
        {"groups/count": 3.0, "rollout/generated_groups": 4.0},
        {"groups/count": 1.0, "rollout/generated_groups": 2.0, "reward/f/a/mean": 0.5, "rollout/reward/f/a": 0.75},
        {"groups/count": 4.0, "rollout/generated_groups": 0.0},
    ]
    result = together(*steps)
    assert (result["reward/f/a/mean"], result["rollout/reward/f/a"]) == (0.5 / 8, 2 * 0.75 / 6)


def test_a_mean_without_weight_is_left_out() -> None:
    assert together({"update/tokens": 0.0, "ratio/mean": 1.0}) == {"update/tokens": 0.0}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"loss/mean_of_max": 1.0}, "loss/mean_of_max has no aggregation rule"),
        ({"reward/mean": 1.0}, "weighted by groups/count"),
    ],
)
def test_a_metric_without_a_rule_or_weight_is_refused(step: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        together(step)


def test_documented_metrics_and_rules_have_the_same_names() -> None:
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+(?:/\w+)+)`", "\n".join(rows))) == set(RULES)


def test_every_metric_has_the_rule_of_its_meaning() -> None:
    """The rules a second time, by kind: what is counted is summed, what is a state is the last one, and so on."""
    found: dict[str, set[str]] = {}
    for name, rule in RULES.items():
        found.setdefault(f"{rule.kind} by {rule.by}" if rule.by else rule.kind, set()).add(name)
    times = {name for name in RULES if name.startswith("time/")}
    states = {name for name in RULES if name.startswith(("queue/", "ledger/"))}
    assert found == {
        "sum": times | set(SUMS.split()),
        "last": states | set(LASTS.split()),
        "max": set(LARGEST.split()),
        "min": {"reward/min", "advantage/min", "response/length_min"},
        "mean by update/count": {"loss/policy", "loss/grad_norm", "correction/effective_sample_size"},
        "mean by update/rollouts": {
            "correction/chi2_sequence",
            "correction/perplexity",
            "correction/rollout_perplexity",
        },
        "mean by groups/count": set(OF_GROUPS.split()),
        "deviation by groups/count": {"reward/std", "advantage/std"},
        "mean by response/trained_tokens": {"staleness/token_mean"},
        "mean by update/tokens": set(OF_TOKENS.split()),
        "mean by rollout/generated_groups": set(OF_GENERATED.split()),
        "mean by time/step": {"idle/trainer", "idle/rollouter", "throughput/tokens_per_second"},
    }


def test_a_shorter_last_step_counts_by_its_optimizer_steps() -> None:
    # Losses 1, 2, 3 and, of the last step's only mini-batch, 6: 12 of 4
    one = {"update/count": 3.0, "loss/policy": 2.0, "loss/grad_norm": 1.0}
    two = {"update/count": 1.0, "loss/policy": 6.0, "loss/grad_norm": 5.0}
    assert together(one, two) == {"update/count": 4.0, "loss/policy": 3.0, "loss/grad_norm": 2.0}


def test_deviations_of_steps_of_different_sizes_are_weighted() -> None:
    # Rewards 0 and 2 of a group of two, then 1 and 5 in each of two groups.
    one = {"groups/count": 1.0, "reward/mean": 1.0, "reward/std": 1.0}
    two = {"groups/count": 2.0, "reward/mean": 3.0, "reward/std": 2.0}
    assert together(one, two)["reward/std"] == pytest.approx(np.std([0, 2, 1, 5, 1, 5]))


def test_every_weight_is_a_metric_with_a_rule() -> None:
    named = {rule.by for rule in RULES.values()} | {rule.mean for rule in RULES.values()}
    assert named - {None} <= set(RULES)
    assert {RULES[str(rule.by)].kind for rule in RULES.values() if rule.everywhere} == {"sum"}


@pytest.mark.parametrize("name", ["reward/even/mean", "reward/even/format/mean", "rollout/reward/even/format"])
def test_parts_of_a_reward_have_a_rule(name: str) -> None:
    assert rule_of(name).kind == "mean"
