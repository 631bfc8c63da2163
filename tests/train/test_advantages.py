from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_rig import make_group, make_rollout

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.errors import DataError
from tidemill.records import Group
from tidemill.train.advantages import estimate, suffix_sums, whiten

ESTIMATORS = [
    "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "pass_at_k", "gdpo"
]  # fmt: skip


def group_of(*rewards: float, mask: list[float] | None = None) -> Group:
    """One learned token a rollout, or those of `mask`."""
    mask = mask or [1.0]
    rollouts = [make_rollout([5] * len(mask), mask, reward) for reward in rewards]
    return make_group(0, [9], *(replace(r, reward_parts={"f": r.reward}) for r in rollouts))


def estimated(groups: list[Group], estimator: str = "grpo", **settings: Any) -> list[list[list[float]]]:
    algorithm = AlgorithmConfig.model_validate({"adv_estimator": estimator, **settings})
    found = estimate(algorithm, groups, reward_weights={"f": 1.0, "g": 1.0})
    return [[array.tolist() for array in group] for group in found]


def firsts(groups: list[Group], estimator: str = "grpo", **settings: Any) -> list[float]:
    return [tokens[0] for group in estimated(groups, estimator, **settings) for tokens in group]


@pytest.mark.parametrize(
    ("estimator", "settings", "rewards", "expected"),
    [
        ("grpo", {}, (1, 0, 0, 0), (1.499997, -0.499999, -0.499999, -0.499999)),
        ("grpo", {"normalize_std": False}, (1, 0, 0, 0), (0.75, -0.25, -0.25, -0.25)),
        ("grpo", {}, (0, *(0.1,) * 7), (-2.474804, *(0.353543,) * 7)),
        ("rloo", {}, (1, 0, 0, 0), (1, -1 / 3, -1 / 3, -1 / 3)),
        ("pass_at_k", {"pass_k": 2}, (1, 0, 0, 0), (1, *(-1 / 3,) * 3)),
        ("pass_at_k", {"pass_k": 2}, (1, 0, 1, 0), (0.447214, -0.447214, 0.447214, -0.447214)),
        ("pass_at_k", {"pass_k": 3}, (1, 0, 1, 0), (0, 0, 0, 0)),
        ("reinforce", {}, (1, -2, 0, 0), (1, -2, 0, 0)),
        ("reinforce_plus_plus", {}, (1, 0, 0, 1), (0.866025, -0.866025, -0.866025, 0.866025)),
    ],
)
def test_one_group_against_plain_numbers(
    estimator: str, settings: dict[str, Any], rewards: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    np.testing.assert_allclose(firsts([group_of(*rewards)], estimator, **settings), expected, atol=1e-6)


def test_groups_of_different_sizes_are_compared_each_for_itself() -> None:
    groups = [group_of(1, 0), group_of(1, 1, 1), group_of(0.7)]
    assert firsts(groups, normalize_std=False) == [0.5, -0.5, 0, 0, 0, 0]
    assert firsts(groups, "rloo") == [1, -1, 0, 0, 0, 0]


def test_the_baseline_form_whitens_over_the_tokens_of_the_step() -> None:
    groups = [group_of(1, 0, mask=[1]), group_of(0, 1, mask=[1, 1, 0])]
    tokens = [0.5, -0.5, -0.5, -0.5, 0.5, 0.5]
    expected = np.array(tokens) / math.sqrt(np.var(tokens, ddof=1) + 1e-8)
    found = estimated(groups, "reinforce_plus_plus_baseline")
    np.testing.assert_allclose(np.concatenate(found[0]), expected[:2], rtol=1e-6)
    np.testing.assert_allclose(found[1][0], [*expected[2:4], 0], rtol=1e-6)


def test_gdpo_normalises_every_part_and_whitens_over_rollouts() -> None:
    parts = [[(1, 0), (0, 0)], [(1, 1), (0, 0)]]
    groups = [
        make_group(
            0, [9], *(replace(make_rollout([5] * length), reward_parts={"f": f, "g/x": g}) for f, g in group)
        )
        for group, length in zip(parts, (1, 3), strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose(firsts(groups, "gdpo"), [0.547723, -0.547723, 1.095445, -1.095445], atol=2e-6)


def test_a_discounted_reward_reaches_the_tokens_before_a_tool() -> None:
    group = make_group(0, [9], make_rollout([5, 6, 7], [1, 0, 1], 1.0), make_rollout([5, 6, 7], [1, 1, 0], 1.0))
    assert estimated([group], "reinforce", gamma=0.5) == [[[0.5, 0, 1], [0.5, 1, 0]]]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3e6])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "pass_at_k", "gdpo"])
def test_equal_rewards_give_exact_zeros(value: float, estimator: str) -> None:
    assert not any(firsts([group_of(*[value] * 7), group_of(1, 0, 0.3, 7)], estimator)[:7])


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=6), min_size=1, max_size=4),
    st.sampled_from(ESTIMATORS),
    st.randoms(use_true_random=False),
)
def test_the_order_of_groups_and_rollouts_does_not_matter(rewards: list[list[int]], name: str, random: Any) -> None:
    order = random.sample(range(len(rewards)), len(rewards))
    inner = [random.sample(range(len(group)), len(group)) for group in rewards]
    plain = estimated([group_of(*group, mask=[1, 0, 1]) for group in rewards], name)
    moved = estimated([group_of(*(rewards[i][j] for j in inner[i]), mask=[1, 0, 1]) for i in order], name)
    np.testing.assert_allclose(
        np.concatenate(moved),
        np.concatenate([[plain[i][j] for j in inner[i]] for i in order]),
        atol=1e-5,
    )


@given(
    st.lists(st.integers(-5, 5), min_size=4, max_size=8),
    st.integers(-100, 100),
    st.sampled_from(["grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo"]),
)
def test_a_constant_added_to_the_rewards_of_a_prompt_changes_nothing(
    rewards: list[int], constant: int, name: str
) -> None:
    other = group_of(3, 1, 4, 1)
    shifted = [group_of(*(reward + constant for reward in rewards)), other]
    np.testing.assert_allclose(firsts(shifted, name), firsts([group_of(*rewards), other], name), atol=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_have_no_advantage_and_change_none(name: str) -> None:
    rewards = (1, 0, 0, 2)
    plain = estimated([group_of(*rewards, mask=[1, 1])], name, **({"gamma": 0.5} if name == "reinforce" else {}))
    masked = estimated(
        [group_of(*rewards, mask=[0, 1, 0, 0, 1, 0])], name, **({"gamma": 0.5} if name == "reinforce" else {})
    )
    assert masked == [[[0, first, 0, 0, last, 0] for first, last in plain[0]]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rollout_without_learned_tokens_still_counts_in_the_mean_of_its_group(name: str) -> None:
    whole = group_of(1, 0, 0, 0, mask=[1, 1])
    empty = replace(whole.rollouts[0], loss_mask=np.zeros(2, np.float32))
    found = estimated([replace(whole, rollouts=(empty, *whole.rollouts[1:]))], name)
    assert found[0][0] == [0, 0]
    if name in ("grpo", "rloo", "pass_at_k", "gdpo"):
        assert found[0][1:] == estimated([whole], name)[0][1:]


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_suffix_sums_are_those_of_a_loop(decay: float) -> None:
    values = np.random.default_rng(0).normal(size=(5, 40))
    expected, following = np.zeros_like(values), np.zeros(5)
    for column in reversed(range(40)):
        following = expected[:, column] = values[:, column] + decay * following
    np.testing.assert_allclose(suffix_sums(values, decay), expected, rtol=1e-12)


def test_a_single_value_is_not_whitened() -> None:
    assert whiten(np.array([[3.0, 0.0]]), np.array([[True, False]])).tolist() == [[3, 0]]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(DataError, match=r"prompts \[0\] have rewards"):
        estimated([group_of(1, reward)])
    part = replace(make_rollout([5]), reward_parts={"f": reward})
    with pytest.raises(DataError, match=r"prompts \[3\] have rewards"):
        estimated([group_of(1, 0), make_group(3, [9], part)], "gdpo")


def test_a_group_without_rollouts_is_refused() -> None:
    with pytest.raises(DataError, match=r"groups of \[2, 0\] rollouts"):
        estimated([group_of(1, 0), group_of()])
