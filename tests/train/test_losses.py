from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tidemill.train.losses import k3, kl_penalty, ppo_clip


def clip(
    ratio: float, advantage: float, *, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> tuple[float, float, dict[str, Tensor]]:
    """Loss of one token, its gradient by the log-prob, and the sums."""
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, sums = ppo_clip(
        log_prob,
        torch.zeros(1),
        torch.tensor([advantage]),
        torch.ones(1),
        denominator=1.0,
        clip_ratio_low=low,
        clip_ratio_high=high,
        dual_clip=dual,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad.item(), sums


# d(-r A)/d log r = -r A where nothing is clipped, 0 where the clip decides.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),  # already likelier than 1.2 times: no more reward
        (0.5, 1.0, -0.5, -0.5),  # min keeps the lower one, with gradient
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found = clip(ratio, advantage)
    assert found[:2] == pytest.approx((loss, gradient), rel=1e-6)
    assert found[2]["clipped"].item() == (gradient == 0)


def test_clip_higher_leaves_more_room_above() -> None:
    assert clip(1.25, 1.0, high=0.28)[:2] == pytest.approx((-1.25, -1.25))
    assert clip(1.5, 1.0, high=0.28)[:2] == pytest.approx((-1.28, 0.0))
    assert clip(0.5, -1.0, high=0.28)[:2] == pytest.approx((0.8, 0.0))


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    assert clip(10.0, -2.0, dual=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert clip(10.0, -2.0, dual=None)[:2] == pytest.approx((20.0, 20.0))
    assert clip(2.0, -2.0, dual=3.0)[:2] == pytest.approx((4.0, 4.0))
    assert clip(10.0, 2.0, dual=3.0)[:2] == pytest.approx((-2.4, 0.0))
    counted = [clip(ratio, -2.0, dual=3.0)[2]["clipped"].item() for ratio in (10.0, 2.0, 0.5)]
    assert counted == [1, 0, 1]


def test_a_zero_advantage_has_no_gradient() -> None:
    assert clip(1.3, 0.0)[:2] == (0.0, 0.0)


def test_an_infinite_ratio_gives_finite_gradients() -> None:
    log_prob = torch.tensor([0.0, 0.0], requires_grad=True)
    old, advantages = torch.tensor([-1e6, 1e6]), torch.tensor([1.0, -1.0])
    loss, _ = ppo_clip(
        log_prob,
        old,
        advantages,
        torch.ones(2),
        denominator=1.0,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        dual_clip=None,
    )
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(log_prob.grad).all()


def test_sums_add_up_over_any_split() -> None:
    torch.manual_seed(0)
    log_probs, old, advantages, weights = torch.randn(4, 12).unbind()
    settings = {"denominator": 7.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "dual_clip": 3.0}
    whole, sums = ppo_clip(log_probs, old, advantages, weights, **settings)
    parts = [ppo_clip(*(t[cut] for t in (log_probs, old, advantages, weights)), **settings)
             for cut in (slice(0, 5), slice(5, 12))]  # fmt: skip
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    for name, value in sums.items():
        torch.testing.assert_close(value, parts[0][1][name] + parts[1][1][name])


def test_k3_by_hand() -> None:
    # r = 2: (2 - 1) - log 2; r = 1: 0
    torch.testing.assert_close(k3(torch.tensor([math.log(2.0), 0.0])), torch.tensor([1 - math.log(2.0), 0.0]))


def test_k3_is_the_kl_divergence_in_expectation() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * k3((reference / policy).log())).sum(), expected)


def test_kl_penalty_pulls_to_the_reference() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    penalty, sums = kl_penalty(log_probs, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 0.5]), denominator=4.0)
    assert sums["reference"].item() == pytest.approx(math.e - 2)
    assert penalty.item() == pytest.approx(0.5 * (math.e - 2) / 4)  # r = e: (e - 1) - 1
    penalty.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0.0, 0.5 * (1 - math.e) / 4])  # d k3 / d log_prob = 1 - r


def test_a_reference_at_infinite_distance_gives_finite_gradients() -> None:
    log_probs = torch.tensor([0.0, -1e6], requires_grad=True)
    penalty, sums = kl_penalty(log_probs, torch.tensor([-1e6, 0.0]), torch.ones(2), denominator=1.0)
    penalty.backward()
    assert torch.isfinite(penalty) and torch.isfinite(sums["reference"]) and torch.isfinite(log_probs.grad).all()
