from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tidemill.config.algorithm import KlLossType
from tidemill.train.kl import kl_loss

KINDS: list[KlLossType] = ["k2", "k3", "k3+", "k3_weighted"]


def expected_gradient(kind: KlLossType, policy: Tensor, reference: Tensor, behaviour: Tensor) -> float:
    """By the first logit, of the expectation over tokens that `behaviour` samples."""
    logits = policy.log().requires_grad_()
    log_probs = torch.log_softmax(logits, -1)
    loss, _ = kl_loss(kind, log_probs, reference.log(), behaviour.log(), behaviour, denominator=1.0)
    loss.backward()
    assert logits.grad is not None
    return float(logits.grad[0])


@pytest.mark.parametrize("kind", ["k2", "k3+", "k3_weighted"])
@pytest.mark.parametrize("behaviour", [[0.7, 0.3], [0.5, 0.5]])
def test_the_gradient_is_that_of_the_divergence_whoever_sampled(kind: KlLossType, behaviour: list[float]) -> None:
    found = expected_gradient(kind, torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5]), torch.tensor(behaviour))
    assert found == pytest.approx(0.177933, abs=1e-5)


def test_k3_has_the_gradient_of_the_reverse_divergence() -> None:
    policy = torch.tensor([0.7, 0.3])
    assert expected_gradient("k3", policy, torch.tensor([0.5, 0.5]), policy) == pytest.approx(0.2, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "values", "gradients"),
    [("k2", (0.125, 12.5), (0.5, -5)), ("k3", (0.106531, 142.413159), (0.393469, -147.413159)),
     ("k3+", (0.106531, 142.413159), (0.5, -5))],
)  # fmt: skip
def test_values_and_gradients_by_hand(
    kind: KlLossType, values: tuple[float, float], gradients: tuple[float, float]
) -> None:
    log_probs = torch.tensor([-1.0, -6.0], requires_grad=True)
    reference, sampled = torch.tensor([-1.5, -1.0]), torch.tensor([-1.0, -6.0])
    weights = torch.tensor([1.0, 0.5])
    loss, sums = kl_loss(kind, log_probs, reference, sampled, weights, denominator=4.0)
    loss.backward()
    assert log_probs.grad is not None
    assert loss.item() == pytest.approx((values[0] + values[1] / 2) / 4, rel=1e-5)
    assert log_probs.grad.tolist() == pytest.approx([gradients[0] / 4, gradients[1] / 8], rel=1e-5)
    assert sums["reference"].item() == pytest.approx(0.106531 + 142.413159, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_at_infinite_distance_gives_finite_gradients(kind: KlLossType) -> None:
    log_probs = torch.tensor([0.0, -1e6], requires_grad=True)
    loss, sums = kl_loss(kind, log_probs, torch.tensor([-1e6, 0.0]), torch.zeros(2), torch.ones(2), denominator=1.0)
    loss.backward()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
    assert math.isfinite(loss.item()) and math.isfinite(sums["reference"].item())
