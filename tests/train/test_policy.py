"""The computation of a rank, against plain forward passes of one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from train_rig import (
    TEMPERATURE,
    batches_of,
    make_group,
    make_rank,
    make_rollout,
    plain_log_probs,
    random_advantages,
    random_groups,
    save_llama,
)

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.errors import RunError
from tidemill.records import Float32Array, Group
from tidemill.train.batch import MicroBatch, step_denominator
from tidemill.train.correction import Rollouts
from tidemill.train.kl import kl_loss
from tidemill.train.losses import policy_loss
from tidemill.train.policy import PolicyRank

Gradients = dict[str, torch.Tensor]
PLAIN_BOUND = 2e-5  # absolute, float32


def gradients(rank: PolicyRank, batches: list[MicroBatch], denominator: float) -> Gradients:
    """Of all micro-batches, without a step."""
    rank.optimizer.zero_grad()
    for batch in batches:
        rank.backward(batch, denominator)
    return {name: parameter.grad.clone() for name, parameter in rank.parameters.items()}


def plain_gradients(rank: PolicyRank, groups: list[Group], advantages: list[Float32Array]) -> Gradients:
    """Row by row, with masked tokens weighted 0."""
    rank.optimizer.zero_grad()
    a, denominator = rank.algorithm, step_denominator(groups, rank.algorithm.aggregation)
    for group, values in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            mask = torch.from_numpy(rollout.loss_mask)
            weights = mask / mask.sum().clamp(min=1) if a.aggregation == "sequence" else mask
            new = plain_log_probs(rank.model, group, rollout)
            old = torch.from_numpy(rollout.log_probs)
            spread, own = torch.full_like(new, float(advantage)), Rollouts.of(torch.zeros(len(new)))
            loss, _ = policy_loss(a, new, old, spread, weights, own, denominator=denominator)
            if rank.reference is not None:
                with torch.no_grad():
                    reference = plain_log_probs(rank.reference.model, group, rollout)
                kl, _ = kl_loss(a.kl_loss_type, new, reference, old, weights, denominator=denominator)
                loss = loss + a.kl_loss_coef * kl
            loss.backward()
    return {name: parameter.grad.clone() for name, parameter in rank.parameters.items()}


def assert_equal_gradients(found: Gradients, wanted: Gradients) -> None:
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("max_tokens", [200, 25, 8])
def test_packed_log_probs_equal_plain_ones(llama: Path, max_tokens: int) -> None:
    rank, groups = make_rank(llama), random_groups(5)
    (batches,) = batches_of(groups, random_advantages(groups), max_tokens)
    found = np.concatenate(rank.log_probs(batches))
    # A target is identified by its advantage and its old log-prob.
    keys = [(a, o) for b in batches for a, o in zip(b.targets.advantages, b.targets.old_log_probs, strict=True)]
    expected = {}
    with torch.no_grad():
        for group, values in zip(groups, random_advantages(groups), strict=True):
            for rollout, advantage in zip(group.rollouts, values, strict=True):
                plain = plain_log_probs(rank.model, group, rollout).numpy()
                learned = np.flatnonzero(rollout.loss_mask)
                expected |= {(advantage, rollout.log_probs[i]): plain[i] for i in learned}
    assert len(keys) == len(expected) == step_denominator(groups, "token")
    np.testing.assert_allclose(found, [expected[key] for key in keys], atol=PLAIN_BOUND, rtol=0)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_gradient_equals_the_plain_one(tmp_path: Path, aggregation: str, tied: bool) -> None:
    rank = make_rank(save_llama(tmp_path, tied=tied), AlgorithmConfig.model_validate({"aggregation": aggregation}))
    groups = random_groups(5)
    advantages = random_advantages(groups)
    (batches,) = batches_of(groups, advantages, 40, aggregation=aggregation)
    found = gradients(rank, batches, step_denominator(groups, rank.algorithm.aggregation))
    assert_equal_gradients(found, plain_gradients(rank, groups, advantages))


def test_gradient_with_kl_penalty_equals_the_plain_one(llama: Path) -> None:
    rank, groups = make_rank(llama, AlgorithmConfig(kl_loss_coef=0.5)), random_groups(3)
    with torch.no_grad():  # away from the reference, where the penalty has no slope
        for parameter in rank.parameters.values():
            parameter.mul_(1.05)
    advantages = random_advantages(groups)
    advantages[0][:] = 0
    (batches,) = batches_of(groups, advantages, 60, keep_all=True)
    found = gradients(rank, batches, step_denominator(groups, "token"))
    assert_equal_gradients(found, plain_gradients(rank, groups, advantages))


@pytest.mark.parametrize(("max_tokens", "ranks"), [(200, 1), (25, 1), (1, 1), (60, 3)])
def test_gradient_is_the_same_for_every_split(llama: Path, max_tokens: int, ranks: int) -> None:
    rank, groups = make_rank(llama), random_groups(6)
    advantages, denominator = random_advantages(groups), step_denominator(groups, "token")
    whole = gradients(rank, batches_of(groups, advantages, 1000)[0], denominator)
    shares = batches_of(groups, advantages, max_tokens, ranks)
    parts = [gradients(rank, [b for b in share if len(b.targets)], denominator) for share in shares]
    assert_equal_gradients({name: sum(part[name] for part in parts) for name in whole}, whole)


def test_omitted_rollouts_do_not_change_the_gradient(llama: Path) -> None:
    rank, groups = make_rank(llama), random_groups(4)
    advantages = random_advantages(groups)
    advantages[0][:] = 0
    advantages[1][1] = 0
    found, kept = (batches_of(groups, advantages, 500, keep_all=keep)[0] for keep in (False, True))
    assert sum(b.token_ids.size for b in found) < sum(b.token_ids.size for b in kept)
    denominator = step_denominator(groups, "token")
    assert_equal_gradients(gradients(rank, found, denominator), gradients(rank, kept, denominator))


def test_gradient_checkpointing_changes_nothing(llama: Path) -> None:
    groups = random_groups(2)
    (batches,) = batches_of(groups, random_advantages(groups), 500)
    found = gradients(make_rank(llama, gradient_checkpointing=True), batches, 9.0)
    assert_equal_gradients(found, gradients(make_rank(llama), batches, 9.0))


def test_padding_never_reaches_the_parameters(llama: Path) -> None:
    rank = make_rank(llama)
    groups = [make_group(0, [5], make_rollout([6])), make_group(1, [8] * 9, make_rollout([7] * 20))]
    (batches,) = batches_of(groups, [np.ones(1, np.float32)] * 2, 200)
    assert batches[0].token_ids.shape == (2, 28)
    found = gradients(rank, batches, 1.0)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
    assert not found["model.embed_tokens.weight"][0].isnan().any()


def test_update_reports_sums_over_the_step(llama: Path) -> None:
    rank, groups = make_rank(llama, max_grad_norm=0.5), random_groups(4)
    (batches,) = batches_of(groups, random_advantages(groups), 40)
    before = np.concatenate(rank.log_probs(batches))
    old = np.concatenate([b.targets.old_log_probs for b in batches])
    result = rank.update(batches, step_denominator(groups, "token"))
    assert result["tokens"] == len(old)
    assert result["ratio/mean"] == pytest.approx(np.exp(before - old).mean(), rel=1e-4)
    k3 = np.expm1(before - old) - (before - old)
    assert result["kl/old_new"] == pytest.approx(k3.mean(), rel=1e-4)
    assert 0 < result["ratio/clip_fraction"] < 1
    assert {"loss", "grad_norm", "lr", "skipped", "time/forward", "time/backward", "time/optimizer"} < result.keys()


@pytest.mark.parametrize("limit", [1e9, 0.125])
def test_the_gradient_is_clipped_to_the_bound_and_the_norm_before_is_reported(
    llama: Path, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    rank, groups = make_rank(llama, max_grad_norm=limit), random_groups(4)
    (batches,) = batches_of(groups, random_advantages(groups), 40)
    denominator, stepped = step_denominator(groups, "token"), []
    found = torch.stack([g.norm() for g in gradients(rank, batches, denominator).values()]).norm().item()
    rank.optimizer.zero_grad()

    def step() -> None:
        stepped.append(torch.stack([p.grad.norm() for p in rank.parameters.values()]).norm().item())

    monkeypatch.setattr(rank.optimizer, "step", step)
    assert rank.update(batches, denominator)["grad_norm"] == pytest.approx(found, rel=1e-4)
    assert found > 0.125
    assert stepped == pytest.approx([min(found, limit)], rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_distance_to_the_reference_is_reported_as_a_mean_over_all_tokens(llama: Path, aggregation: str) -> None:
    rank = make_rank(llama, AlgorithmConfig.model_validate({"kl_loss_coef": 0.5, "aggregation": aggregation}))
    groups, plain = random_groups(3), make_rank(llama)
    with torch.no_grad():
        for parameter in rank.parameters.values():
            parameter.mul_(1.05)
    advantages = random_advantages(groups)
    advantages[0][:] = 0  # its tokens count too
    (batches,) = batches_of(groups, advantages, 60, aggregation=aggregation, keep_all=True)
    gap = np.concatenate(plain.log_probs(batches)) - np.concatenate(rank.log_probs(batches))
    found = rank.update(batches, step_denominator(groups, rank.algorithm.aggregation))
    assert found["kl/reference"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-4)
    assert found["kl/reference"] > 1e-4
    assert "kl/reference" not in plain.update(batches, 1e3)


def test_updates_make_good_responses_likelier(llama: Path) -> None:
    rank = make_rank(llama, learning_rate=1e-4)
    group = make_group(0, [5, 6], make_rollout([7, 8]), make_rollout([9, 10]))
    (batches,) = batches_of([group], [np.array([1, 0], np.float32)], 50)
    before = rank.log_probs(batches)[0].sum()
    losses = [rank.update(batches, 4.0)["loss"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert rank.log_probs(batches)[0].sum() > before


def test_weight_decay_is_decoupled_from_the_gradient(llama: Path) -> None:
    groups, (plain, decaying) = random_groups(2), (make_rank(llama, weight_decay=decay) for decay in (0.0, 0.5))
    before = {name: parameter.detach().clone() for name, parameter in plain.parameters.items()}
    for rank in (plain, decaying):
        rank.update(batches_of(groups, random_advantages(groups), 500)[0], 20.0)
    for name, value in before.items():
        decayed = plain.parameters[name] - plain.trainer.learning_rate * 0.5 * value
        torch.testing.assert_close(decaying.parameters[name], decayed, rtol=0, atol=1e-6)


def test_warm_up_is_linear_and_then_constant(llama: Path) -> None:
    rank, groups = make_rank(llama, learning_rate=0.3, warmup_steps=2), random_groups(1)
    (batches,) = batches_of(groups, random_advantages(groups), 500)
    before = [parameter.detach().clone() for parameter in rank.parameters.values()]
    rates = [rank.update(batches, 9.0)["lr"]]
    moved = [(p - old).abs().max().item() for p, old in zip(rank.parameters.values(), before, strict=True)]
    assert max(moved) == pytest.approx(rates[0], rel=1e-3)  # Adam's first step is the rate times the gradient's sign
    rates += [rank.update(batches, 9.0)["lr"] for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_a_step_without_targets_is_counted_and_changes_nothing(llama: Path) -> None:
    rank = make_rank(llama, warmup_steps=9)
    before = {name: parameter.clone() for name, parameter in rank.parameters.items()}
    result = rank.update([MicroBatch.of([])], 5.0)
    assert (result["skipped"], result["grad_norm"], result["tokens"], rank.updates) == (1, 0, 0, 1)
    assert (result["ratio/mean"], result["ratio/clip_fraction"], result["kl/old_new"]) == (1, 0, 0)
    assert all(torch.equal(before[name], parameter) for name, parameter in rank.parameters.items())


def test_a_gradient_that_is_not_finite_is_refused_before_the_step(llama: Path) -> None:
    rank, groups = make_rank(llama), random_groups(1)
    (batches,) = batches_of(groups, [np.array([1, np.inf, 1, 1], np.float32)], 500)
    before = {name: parameter.clone() for name, parameter in rank.parameters.items()}
    with pytest.raises(RunError, match=r"gradient norm of optimizer step 1 is (nan|inf)"):
        rank.update(batches, 9.0)
    assert all(torch.equal(before[name], parameter) for name, parameter in rank.parameters.items())
    assert all(parameter.grad is None for parameter in rank.parameters.values())  # the next step is not spoilt


def test_score_is_at_temperature_one(llama: Path) -> None:
    rank = make_rank(llama)
    group = make_group(0, [5], make_rollout([6, 7, 8, 9]))
    with torch.no_grad():
        plain = plain_log_probs(rank.model, group, group.rollouts[0], temperature=1.0)
    scores = rank.score(np.array([5, 6, 7, 8, 9], np.int32))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, plain.numpy(), atol=PLAIN_BOUND)


def test_log_probs_are_tempered(llama: Path) -> None:
    rank = make_rank(llama)
    group = make_group(0, [5], make_rollout([6, 7, 8]))
    (batches,) = batches_of([group], [np.ones(1, np.float32)], 50)
    assert rank.temperature == TEMPERATURE != 1
    assert np.abs(rank.log_probs(batches)[0] - rank.score(np.array([5, 6, 7, 8], np.int32))).max() > 0.05


def test_bfloat16_compute_keeps_float32_masters(llama: Path) -> None:
    rank, groups = make_rank(llama, precision="bfloat16"), random_groups(2)
    (batches,) = batches_of(groups, random_advantages(groups), 500)
    rank.update(batches, 20.0)
    assert {parameter.dtype for parameter in rank.parameters.values()} == {torch.float32}
    ids = torch.arange(3, 8)[None]
    hidden = rank.network.hidden(ids, ids - 3, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())
    assert hidden.dtype == torch.bfloat16  # so that the product with the vocabulary is, too
    found, plain = rank.log_probs(batches)[0], make_rank(llama)
    plain.update(batches, 20.0)
    assert np.abs(found - plain.log_probs(batches)[0]).mean() < 0.3
    assert rank.peak_memory_bytes() > 1 << 20
