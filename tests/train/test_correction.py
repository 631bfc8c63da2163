from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.train.correction import Rollouts, correct, diagnostics, importance_weights, log_linear, weight_sums

LOG_RATIO = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3])
ONE = Rollouts.of(torch.zeros(5))


def algorithm(old_log_prob: str = "decoupled", **correction: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"old_log_prob": old_log_prob, "rollout_correction": correction})


def factors(rollouts: Rollouts = ONE, log_ratio: Tensor = LOG_RATIO, **correction: Any) -> list[float]:
    return correct(algorithm("version_start", **correction), log_ratio, rollouts)[0].tolist()


def close(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-5)


def test_truncated_weights_of_tokens() -> None:
    assert factors(rollout_is="token") == close(1.10517, 0.22313, 2, 0.0000454, 1.34986)
    assert factors(rollout_is="token", rollout_is_threshold=None) == close(
        1.10517, 0.22313, 2.22554, 0.0000454, 1.34986
    )


def test_masked_weights_are_those_of_icepop() -> None:
    found = factors(rollout_is="token", rollout_is_threshold=5, rollout_is_threshold_lower=0.5)
    assert found == close(1.10517, 0, 2.22554, 0, 1.34986)


def test_a_sequence_has_the_product_of_its_tokens() -> None:
    rollouts = Rollouts.of(torch.tensor([4, 4, 4, 1, 1]))
    found = factors(rollouts, rollout_is="sequence", rollout_is_threshold=None)
    assert found == close(*[math.exp(-0.6)] * 3, *[math.exp(-9.7)] * 2)
    assert factors(rollout_is="sequence", rollout_is_threshold=None)[0] == pytest.approx(3.3633e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"rollout_rs": "token"}, [1, 0, 0, 0, 1]),
        ({"rollout_rs": "token", "rollout_rs_threshold_lower": 0.2, "rollout_rs_threshold": 2.3}, [1, 1, 1, 0, 1]),
        ({"rollout_rs": "sequence"}, [0, 0, 0, 0, 0]),
        ({"rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.12}, [1, 1, 1, 1, 1]),
        ({"rollout_rs": "geometric", "rollout_rs_threshold_lower": 0.13}, [0, 0, 0, 0, 0]),
        ({"veto_threshold": 1e-4}, [0, 0, 0, 0, 0]),
        ({"veto_threshold": 1e-5}, [1, 1, 1, 1, 1]),
    ],
)
def test_what_is_rejected(settings: dict[str, Any], kept: list[int]) -> None:
    assert factors(**settings) == kept


def test_bounds_are_those_of_the_trained_over_the_sampling_probability() -> None:
    settings = {"rollout_rs": "token", "rollout_rs_threshold_lower": 0.6, "rollout_rs_threshold": 1.4}
    assert factors(Rollouts.of(torch.zeros(2)), torch.tensor([0.65, 1.5]).log(), **settings) == [1, 0]


def test_rejection_is_of_whole_rollouts_and_leaves_the_others() -> None:
    rollouts = Rollouts.of(torch.tensor([7, 7, 2, 2, 7]))
    assert factors(rollouts, rollout_rs="sequence", rollout_rs_threshold_lower=0.3) == [1, 1, 0, 0, 1]
    assert factors(rollouts, veto_threshold=1e-3) == [1, 1, 0, 0, 1]


def test_normalised_weights_have_mean_one() -> None:
    log_ratio, rollouts = torch.tensor([0.5, 1, 2]).log(), Rollouts.of(torch.zeros(3))
    settings = algorithm(rollout_is="token", rollout_is_batch_normalize=True)
    total, count = weight_sums(settings, log_ratio, rollouts).tolist()
    found, _ = correct(settings, log_ratio, rollouts, total / count)
    assert found.tolist() == close(0.428571, 0.857143, 1.714286)


def test_the_mean_weight_of_sequences_is_over_sequences() -> None:
    log_ratio, rollouts = torch.tensor([0.5, 1, 2]).log(), Rollouts.of(torch.tensor([0, 0, 1]))
    settings = algorithm(rollout_is="sequence", rollout_is_threshold=None)
    assert weight_sums(settings, log_ratio, rollouts).tolist() == close(2.5, 2)


def test_sums_for_the_metrics() -> None:
    log_ratio, rollouts = torch.tensor([1.0, 1, 1, 5]).log(), Rollouts.of(torch.tensor([0, 0, 1, 1]))
    _, sums = correct(algorithm(rollout_is_threshold=None), log_ratio, rollouts)
    assert sums["weight"].item() ** 2 / (4 * sums["weight_squares"].item()) == pytest.approx(0.571429)
    _, sums = correct(algorithm(rollout_is_threshold=2.0), log_ratio, rollouts)
    assert sums["weight"].item() ** 2 / (4 * sums["weight_squares"].item()) == pytest.approx(0.892857)
    assert (sums["truncated"].item(), sums["rejected"].item()) == (1, 0)
    assert sums["weight_max"].item() == pytest.approx(5)
    assert diagnostics(log_ratio, torch.zeros(4), rollouts)["chi2_token"].item() / 4 - 1 == pytest.approx(6)


def test_diagnostics_by_hand() -> None:
    log_probs, sampled = torch.tensor([-1.2, -0.8]), torch.tensor([-1.0, -0.7])
    sums = diagnostics(log_probs - sampled, sampled, Rollouts.of(torch.zeros(2)))
    found = [
        sums["perplexity"], sums["perplexity_rollout"], sums["kl_rollout"] / 2, sums["k3_rollout"] / 2,
        sums["chi2_token"] / 2 - 1, sums["chi2_sequence"] - 1, sums["rollouts"],
    ]  # fmt: skip
    assert [float(value) for value in found] == close(2.718282, 2.339647, 0.15, 0.011784, -0.255475, -0.451188, 1)


def test_weights_turn_a_mean_over_behaviour_into_one_over_the_proximal_policy() -> None:
    behaviour, proximal = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    values, rollouts = torch.tensor([1.0, -2.0, 4.0]), Rollouts.of(torch.arange(3))
    weights, _ = importance_weights(algorithm(rollout_is_threshold=None), (proximal / behaviour).log(), rollouts)
    torch.testing.assert_close((behaviour * weights * values).sum(), (proximal * values).sum())


def test_weights_stay_finite_whatever_the_log_probs_are() -> None:
    log_ratio, rollouts = torch.tensor([1e6, -1e6]), Rollouts.of(torch.arange(2))
    for level in ("token", "sequence"):
        weights, sums = correct(algorithm(rollout_is=level, rollout_is_threshold=None), log_ratio, rollouts)
        assert torch.isfinite(weights).all() and all(torch.isfinite(value) for value in sums.values())


@given(
    start=st.floats(-20, 0),
    slope=st.floats(-2, 2),
    version=st.integers(0, 50),
    age=st.integers(0, 9),
    step=st.integers(0, 3),
)
def test_interpolation_is_exact_if_log_probs_change_evenly(
    start: float, slope: float, version: int, age: int, step: int
) -> None:
    done = step / 4
    behaviour, proximal, present = (torch.tensor([start + slope * v]) for v in (0, age, age + done))
    found = log_linear(present, behaviour, torch.tensor([version - age]), version=version, done=done)
    torch.testing.assert_close(found, proximal, rtol=1e-5, atol=1e-4)


def test_interpolation_at_the_end_of_a_version_is_that_of_the_paper() -> None:
    # A-3PO: weight 1 / d for the behaviour policy of a token that is d versions old, counted from the present policy.
    ages = torch.tensor([0, 1, 3])
    found = log_linear(torch.zeros(3), torch.full((3,), -12.0), 7 - ages, version=7, done=1.0)
    torch.testing.assert_close(found, -12.0 / (ages + 1))


def test_the_first_step_of_a_version_trains_from_the_proximal_policy_itself() -> None:
    present, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -3.0])
    assert torch.equal(log_linear(present, behaviour, torch.tensor([4, 1]), version=4, done=0.0), present)


def test_the_proximal_policy_of_a_token_of_the_current_version_is_the_behaviour_policy() -> None:
    found = log_linear(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([4]), version=4, done=0.5)
    assert found.tolist() == [-3.0]
