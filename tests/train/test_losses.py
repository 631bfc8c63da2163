from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.train.correction import Rollouts
from tidemill.train.losses import k3, policy_loss

MODES = ["ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "dppo_tv", "dppo_kl", "policy_gradient", "icepop"]


def loss_of(
    log_ratios: list[float],
    advantages: list[float],
    old: list[float] | None = None,
    *,
    rollouts: list[int] | None = None,
    denominator: float = 1.0,
    weights: list[float] | None = None,
    **settings: Any,
) -> tuple[float, list[float], dict[str, Tensor]]:
    """The loss, its gradient by the log-probs, and the sums."""
    before = torch.tensor(old or [-2.0] * len(log_ratios))
    log_probs = (before + torch.tensor(log_ratios)).requires_grad_()
    loss, sums = policy_loss(
        AlgorithmConfig.model_validate(settings),
        log_probs,
        before,
        torch.tensor(advantages),
        torch.tensor(weights or [1.0] * len(log_ratios)),
        Rollouts.of(torch.tensor(rollouts or [0] * len(log_ratios))),
        denominator=denominator,
    )
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad.tolist(), sums


def one(ratio: float, advantage: float, **settings: Any) -> tuple[float, float]:
    loss, gradient, _ = loss_of([math.log(ratio)], [advantage], **settings)
    return loss, gradient[0]


def probabilities(old: float, new: float, advantage: float, mode: str) -> tuple[float, float]:
    loss, gradient, _ = loss_of([math.log(new / old)], [advantage], [math.log(old)], loss_mode=mode)
    return loss, gradient[0]


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
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found, found_gradient, sums = loss_of([math.log(ratio)], [advantage])
    assert (found, found_gradient[0]) == pytest.approx((loss, gradient), rel=1e-6)
    assert sums["clipped"].item() == (gradient == 0 and advantage != 0)


def test_clip_higher_leaves_more_room_above() -> None:
    assert one(1.25, 1.0, clip_ratio_high=0.28) == pytest.approx((-1.25, -1.25))
    assert one(1.5, 1.0, clip_ratio_high=0.28) == pytest.approx((-1.28, 0.0))
    assert one(0.5, -1.0, clip_ratio_high=0.28) == pytest.approx((0.8, 0.0))


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    assert one(5.0, -1.0, dual_clip=3.0) == pytest.approx((3.0, 0.0))
    assert one(5.0, -1.0, dual_clip=None) == pytest.approx((5.0, 5.0))
    assert one(2.0, -2.0, dual_clip=3.0) == pytest.approx((4.0, 4.0))
    assert one(10.0, 2.0, dual_clip=3.0) == pytest.approx((-2.4, 0.0))


GSPO = {"loss_mode": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}


def test_gspo_clips_the_geometric_mean_of_a_response() -> None:
    ratios = [0.1, -0.05, 0.2, -0.01]
    loss, gradient, sums = loss_of(ratios, [1.0] * 4, weights=[0.25] * 4, **GSPO)
    assert (loss, gradient) == (pytest.approx(-1.0004, abs=1e-6), [0, 0, 0, 0])
    assert sums["clipped"].item() == 4
    loss, gradient, _ = loss_of(ratios, [-1.0] * 4, weights=[0.25] * 4, **GSPO)
    assert (loss, gradient) == (pytest.approx(1.061837, abs=1e-6), pytest.approx([1.061837 / 4] * 4, abs=1e-6))


def test_gspo_token_has_the_value_of_gspo_and_the_advantage_of_the_token() -> None:
    ratios, advantages = [0.1, -0.05, 0.2, -0.01], [-1.0, -2.0, -1.0, 0.0]
    loss, gradient, _ = loss_of(ratios, advantages, weights=[0.25] * 4, **(GSPO | {"loss_mode": "gspo_token"}))
    assert loss == pytest.approx(1.061837, abs=1e-6)
    assert gradient == pytest.approx([1.061837 * -a / 4 for a in advantages], abs=1e-6)


def test_gspo_does_not_mix_responses() -> None:
    settings = {"loss_mode": "gspo", "clip_ratio_low": 0.9, "clip_ratio_high": 9}
    both = loss_of([0.1, 0.3, -0.5], [1.0, 1.0, -1.0], rollouts=[7, 7, 3], **settings)[0]
    assert both == pytest.approx(-2 * math.exp(0.2) + math.exp(-0.5))


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    settings = {"loss_mode": "cispo", "clip_ratio_low": 1, "clip_ratio_high": 4}
    loss, gradient, sums = loss_of([math.log(6)], [-1.0], [-2 - math.log(6)], **settings)
    assert (loss, gradient[0], sums["clipped"].item()) == (pytest.approx(-10), pytest.approx(5), 1)
    assert one(0.5, 1.0, **settings)[1] == pytest.approx(-0.5)


@pytest.mark.parametrize(("ratio", "kept"), [(1.4, True), (6.1, False), (0.4, False)])
def test_icepop_leaves_out_tokens_outside_of_its_bounds(ratio: float, kept: bool) -> None:
    found = one(ratio, 2.0, loss_mode="icepop", clip_ratio_low=0.5, clip_ratio_high=5)
    assert found[1] == pytest.approx(-2 * ratio if kept else 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.5, 1.0, -2.489837), (1.5, -1.0, 2.393585), (1.0, 1.0, -2.0)]
)
def test_sapo_gates_softly(ratio: float, advantage: float, loss: float) -> None:
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    gradient = -4 * gate * (1 - gate) * ratio * advantage
    assert one(ratio, advantage, loss_mode="sapo") == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "kept"),
    [(0.01, 0.05, 1.0, True), (0.9, 0.65, 1.0, True), (0.9, 0.65, -1.0, False), (0.9, 0.75, -1.0, True),
     (0.5, 0.75, 1.0, False), (0.5, 0.75, -1.0, True)],
)  # fmt: skip
def test_dppo_bounds_the_change_in_probability(old: float, new: float, advantage: float, kept: bool) -> None:
    expected = -new / old * advantage if kept else 0
    assert probabilities(old, new, advantage, "dppo_tv") == pytest.approx((expected, expected))


@pytest.mark.parametrize(
    ("old", "new", "divergence"), [(0.01, 0.05, 0.024736), (0.9, 0.65, 0.167604), (0.5, 0.75, 0.143841)]
)
def test_dppo_bounds_the_binary_divergence(old: float, new: float, divergence: float) -> None:
    sign = 1.0 if new > old else -1.0
    for bound, kept in ((divergence * 1.001, True), (divergence * 0.999, False)):
        settings = {"loss_mode": "dppo_kl", "clip_ratio_low": bound, "clip_ratio_high": bound}
        gradient = loss_of([math.log(new / old)], [sign], [math.log(old)], **settings)[1][0]
        assert gradient == pytest.approx(-sign * new / old if kept else 0, rel=1e-4)


def test_the_policy_gradient_has_no_ratio() -> None:
    assert one(3.0, -2.0, loss_mode="policy_gradient") == pytest.approx((2 * (math.log(3) - 2), 2.0))


@pytest.mark.parametrize("mode", MODES)
def test_with_the_policy_unchanged_every_loss_is_the_policy_gradient(mode: str) -> None:
    _, gradient, _ = loss_of([0.0, 0.0, 0.0], [1.0, 1.0, -2.0], rollouts=[0, 0, 1], loss_mode=mode)
    assert gradient == pytest.approx([-1.0, -1.0, 2.0])


@pytest.mark.parametrize("mode", MODES)
def test_an_infinite_ratio_gives_finite_gradients(mode: str) -> None:
    loss, gradient, _ = loss_of([1e6, -1e6], [1.0, -1.0], [-1e6, 0.0], rollouts=[0, 1], loss_mode=mode)
    assert math.isfinite(loss) and all(map(math.isfinite, gradient))


@given(
    st.sampled_from(MODES),
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-3, 3), st.integers(0, 3)), min_size=2, max_size=9),
    st.integers(0, 3),
)
def test_sums_add_up_over_any_split_into_whole_rollouts(
    mode: str, tokens: list[tuple[float, float, int]], last: int
) -> None:
    settings: dict[str, Any] = {"loss_mode": mode, "denominator": 7.0}

    def of(part: list[tuple[float, float, int]]) -> tuple[float, dict[str, Tensor]]:
        if not part:
            return 0.0, {}
        loss, _, sums = loss_of([t[0] for t in part], [t[1] for t in part], rollouts=[t[2] for t in part], **settings)
        return loss, sums

    whole, first, second = of(tokens), of([t for t in tokens if t[2] <= last]), of([t for t in tokens if t[2] > last])
    assert whole[0] == pytest.approx(first[0] + second[0], abs=1e-4)
    for name, value in whole[1].items():
        parts = [float(part[1].get(name, 0.0)) for part in (first, second)]
        assert float(value) == pytest.approx(sum(parts), abs=1e-3)


@pytest.mark.parametrize("mode", ["ppo_clip", "gspo", "sapo", "dppo_tv", "dppo_kl", "policy_gradient"])
def test_gradients_are_those_of_finite_differences(mode: str) -> None:
    """The other losses have a detached factor: their gradients are not those of their values."""
    ratios, advantages, step = [0.05, -0.1, 0.12], [1.0, -0.5, 0.7], 1e-2
    _, gradient, _ = loss_of(ratios, advantages, rollouts=[0, 0, 1], loss_mode=mode)
    for index in range(3):
        ends = []
        for sign in (1, -1):
            moved = [ratio + sign * step * (place == index) for place, ratio in enumerate(ratios)]
            ends.append(loss_of(moved, advantages, rollouts=[0, 0, 1], loss_mode=mode)[0])
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(gradient[index], rel=1e-2, abs=1e-3)


def test_k3_by_hand() -> None:
    # r = 2: (2 - 1) - log 2; r = 1: 0
    torch.testing.assert_close(k3(torch.tensor([math.log(2.0), 0.0])), torch.tensor([1 - math.log(2.0), 0.0]))


def test_k3_is_the_kl_divergence_in_expectation() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * k3((reference / policy).log())).sum(), expected)
