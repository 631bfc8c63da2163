from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.train.losses import behaviour_weights, log_linear


def logs(*values: float) -> Tensor:
    return torch.tensor(values).log()


def test_weights_are_the_ratio_truncated_at_the_cap() -> None:
    # 0.2 / 0.2 = 1, 0.6 / 0.4 = 1.5, 0.5 / 0.1 = 5, 0.1 / 0.4 = 0.25
    weights, sums = behaviour_weights(logs(0.2, 0.6, 0.5, 0.1), logs(0.2, 0.4, 0.1, 0.4), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, 2.0, 0.25]))
    assert (sums["weight"].item(), sums["truncated"].item()) == (pytest.approx(4.75), 1)
    assert sums["weight_max"].item() == pytest.approx(5.0)


def test_without_a_cap_nothing_is_truncated() -> None:
    weights, sums = behaviour_weights(logs(0.5), logs(0.1), cap=None)
    assert (weights.item(), sums["truncated"].item()) == (pytest.approx(5.0), 0)


def test_weights_turn_a_mean_over_behaviour_into_one_over_the_proximal_policy() -> None:
    behaviour, proximal = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    values = torch.tensor([1.0, -2.0, 4.0])
    weights, _ = behaviour_weights(proximal.log(), behaviour.log(), cap=None)
    torch.testing.assert_close((behaviour * weights * values).sum(), (proximal * values).sum())


def test_weights_stay_finite_whatever_the_log_probs_are() -> None:
    weights, _ = behaviour_weights(torch.tensor([0.0, -1e6]), torch.tensor([-1e6, 0.0]), cap=None)
    assert torch.isfinite(weights).all()
    assert weights[1] == pytest.approx(math.exp(-20))


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
