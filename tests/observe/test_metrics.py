"""Metrics of a step, against values worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.errors import DataError
from tidemill.observe.metrics import group_metrics
from tidemill.records import FinishReason, Float32Array, Group, Prompt, Rollout, VersionSpan
from tidemill.train.advantages import estimate, rollout_means

DOCS = Path(__file__).parents[2] / "docs/metrics.md"


def rollout(
    reward: float,
    spans: tuple[tuple[int, int], ...],
    finish: FinishReason = "stop",
    parts: Mapping[str, float] | None = None,
) -> Rollout:
    """`spans` are (version, number of tokens)."""
    versions, start = [], 0
    for version, tokens in spans:
        versions.append(VersionSpan(version, start, start + tokens))
        start += tokens
    ids, zeros, ones = np.zeros(start, np.int32), np.zeros(start, np.float32), np.ones(start, np.float32)
    return Rollout(ids, zeros, ones, tuple(versions), finish, "", reward, parts or {"exact": reward}, 2.0)


def group(prompt_tokens: int, *rollouts: Rollout) -> Group:
    return Group(Prompt(0, 0, np.zeros(prompt_tokens, np.int32), ""), rollouts)


def advantages(*groups: Group) -> list[Float32Array]:
    return [np.zeros(len(g.rollouts), np.float32) for g in groups]


def test_means_are_over_rollouts_not_over_groups() -> None:
    small = group(10, rollout(1.0, ((5, 2),)))
    large = group(20, *(rollout(0.0, ((5, 4),)) for _ in range(3)))
    metrics = group_metrics([small, large], 5, advantages(small, large))
    assert metrics["reward/mean"] == 0.25
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 0, 0]))
    assert metrics["response/length_mean"] == 3.5
    assert (metrics["response/tokens"], metrics["response/length_max"], metrics["prompt/length_mean"]) == (14, 4, 15)


def test_age_is_counted_from_the_oldest_token_and_also_over_tokens() -> None:
    partial = group(1, rollout(0.0, ((3, 3), (5, 1))), rollout(1.0, ((5, 4),)))
    fresh = group(1, rollout(0.0, ((5, 4),)), rollout(0.0, ((5, 4),)))
    metrics = group_metrics([partial, fresh], 5, advantages(partial, fresh))
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, 1)
    assert metrics["staleness/token_mean"] == 3 * 2 / 16
    assert metrics["staleness/partial_ratio"] == 0.25
    assert metrics["groups/zero_variance_ratio"] == 0.5


def test_ages_are_a_histogram_and_stale_and_partial_rollouts_are_counted() -> None:
    partial = group(1, rollout(0.0, ((3, 1), (4, 1), (5, 3))), rollout(1.0, ((5, 4),)))
    older = group(1, rollout(0.0, ((4, 2),)), rollout(1.0, ((4, 1), (5, 1))))
    fresh = group(1, rollout(0.0, ((5, 4),)), rollout(0.0, ((5, 4),)))
    groups = [partial, older, fresh, fresh]
    metrics = group_metrics(groups, 5, advantages(*groups))
    assert [metrics[f"staleness/groups_of_age/{age}"] for age in range(3)] == [2, 1, 1]
    assert (metrics["staleness/stale_groups"], metrics["staleness/stale_rollouts"]) == (2, 3)
    assert (metrics["staleness/partial_rollouts"], metrics["staleness/partial_span_max"]) == (2, 2)


def test_masked_tokens_have_no_age() -> None:
    partial = rollout(0.0, ((3, 3), (5, 1)))
    masked = replace(partial, loss_mask=np.array([0, 0, 0, 1], np.float32))
    old = replace(rollout(0.0, ((4, 2),)), loss_mask=np.zeros(2, np.float32))
    fresh = group(1, masked, old, rollout(1.0, ((4, 1), (5, 2))))
    metrics = group_metrics([fresh], 5, advantages(fresh))
    assert (metrics["staleness/max"], metrics["staleness/stale_rollouts"]) == (1, 1)
    assert metrics["staleness/token_mean"] == 1 / 4
    assert (metrics["response/tokens"], metrics["response/trained_tokens"]) == (9, 4)
    assert (metrics["staleness/partial_rollouts"], metrics["staleness/partial_span_max"]) == (2, 2)


def test_extremes_and_means_of_every_kind_by_hand() -> None:
    one = group(3, rollout(-1.0, ((5, 2),)), replace(rollout(2.0, ((5, 6),)), seconds=5.0))
    two = group(7, rollout(2.0, ((5, 3),)), replace(rollout(4.0, ((5, 1),)), seconds=3.0))
    metrics = group_metrics([one, two], 5, [np.array([1, 2], np.float32), np.array([-3, 4], np.float32)])
    assert {name: metrics[f"reward/{name}"] for name in ("min", "max", "mean")} == {"min": -1, "max": 4, "mean": 1.75}
    assert (metrics["groups/count"], metrics["groups/zero_variance_ratio"]) == (2, 0)
    lengths = {name: metrics[f"response/{name}"] for name in ("tokens", "length_mean", "length_min", "length_max")}
    assert lengths == {"tokens": 12, "length_mean": 3, "length_min": 1, "length_max": 6}
    assert (metrics["response/seconds_mean"], metrics["response/seconds_max"]) == (3, 5)
    assert (metrics["prompt/length_mean"], metrics["prompt/length_max"]) == (5, 7)
    assert metrics["advantage/std"] == pytest.approx(np.sqrt((0 + 1 + 16 + 9) / 4))
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-3, 4)


def test_a_response_without_tokens_is_not_stale() -> None:
    one = group(1, rollout(0.0, ()), rollout(1.0, ((5, 2),)))
    metrics = group_metrics([one], 5, advantages(one))
    assert [metrics[f"staleness/{name}"] for name in ("max", "stale_rollouts", "partial_rollouts")] == [0, 0, 0]


def test_two_spans_of_one_version_are_not_a_partial_rollout() -> None:
    whole = group(1, rollout(0.0, ((5, 1), (5, 1))))
    metrics = group_metrics([whole], 7, advantages(whole))
    assert [metrics[f"staleness/{name}"] for name in ("max", "partial_ratio", "partial_span_max")] == [2, 0, 0]


def test_rewards_that_differ_only_by_rounding_are_equal() -> None:
    parts = group(1, *(rollout(reward, ((0, 1),)) for reward in (0.1 + 0.2, 0.3)))
    whole = group(1, *(rollout(reward, ((0, 1),)) for reward in (0.25, 0.3)))
    assert not rollout_means([parts], estimate(AlgorithmConfig(), [parts]))[0].any()
    assert group_metrics([parts, whole], 0, advantages(parts, whole))["groups/zero_variance_ratio"] == 0.5


def test_truncation_and_parts_are_counted() -> None:
    one = group(
        1,
        rollout(1.0, ((0, 1),), "length", {"exact": 1.0, "format": 0.5}),
        rollout(0.0, ((0, 1),), "stop", {"exact": 0.0}),
    )
    metrics = group_metrics([one], 0, [np.array([1, -1], np.float32)])
    assert metrics["response/truncated_ratio"] == 0.5
    assert (metrics["reward/exact/mean"], metrics["reward/format/mean"]) == (0.5, 0.25)
    assert (metrics["advantage/std"], metrics["advantage/min"], metrics["advantage/max"]) == (1, -1, 1)


def test_means_of_parts_sum_to_the_mean_reward_even_if_rollouts_lack_parts() -> None:
    parts: list[dict[str, float]] = [{"f/format": 0.25, "f/right": 1.0}, {"f/format": 0.25}, {}, {"f/late": -0.5}]
    one = group(1, *(rollout(sum(part.values()), ((0, 1),), parts=part) for part in parts))
    metrics = group_metrics([one], 0, advantages(one))
    means = [metrics[f"reward/f/{name}/mean"] for name in ("format", "right", "late")]
    assert means == [0.125, 0.25, -0.125]
    assert sum(means) == metrics["reward/mean"]


def test_metrics_without_groups_are_refused() -> None:
    with pytest.raises(DataError, match="0 groups"):
        group_metrics([], 0, [])
    one = group(1, rollout(0.0, ((0, 1),)))
    with pytest.raises(DataError, match="advantages"):
        group_metrics([one], 0, [np.zeros(2, np.float32)])


def test_every_metric_is_documented() -> None:
    one = group(1, rollout(1.0, ((0, 1),), parts={"PART": 1.0}))
    names = group_metrics([one], 0, advantages(one))
    text = DOCS.read_text(encoding="utf-8")
    rows = [re.sub(r"/\d+$", "/AGE", name) for name in names]
    assert [row for row in rows if f"| `{row}` |" not in text] == []
