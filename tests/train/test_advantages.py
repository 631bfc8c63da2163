from __future__ import annotations

import numpy as np
import pytest

from tidemill.train.advantages import grpo_advantages


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_grpo_divides_by_the_population_deviation() -> None:
    # mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875, deviation 0.4330127
    advantages = grpo_advantages(rewards(1, 0, 0, 0), normalize_std=True)
    np.testing.assert_allclose(advantages, [1.7320508, -0.5773503, -0.5773503, -0.5773503], rtol=1e-5)
    assert advantages.dtype == np.float32


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(grpo_advantages(rewards(1, 0, 0, 0), normalize_std=False), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3e6])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exact_zeros(value: float, normalize_std: bool) -> None:
    assert not grpo_advantages(rewards(*[value] * 7), normalize_std).any()


def test_advantages_of_a_group_sum_to_zero() -> None:
    drawn = np.random.default_rng(0).normal(size=16).astype(np.float32)
    assert abs(grpo_advantages(drawn, normalize_std=True).sum()) < 1e-5


def test_no_rollouts_give_no_advantages() -> None:
    assert grpo_advantages(rewards(), normalize_std=True).shape == (0,)
