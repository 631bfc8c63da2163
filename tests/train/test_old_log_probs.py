"""Every choice of the old log-probs, against the plain objective over forward passes of single sequences."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from copies import Copies
from torch import Tensor
from train_rig import batches_of, make_rank, plain_log_probs, random_advantages, random_groups

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.observe.meters import Timings
from tidemill.records import Group, Rollout, VersionSpan
from tidemill.train.batch import MicroBatch, step_denominator
from tidemill.train.policy import PolicyRank
from tidemill.train.trainer import aggregate, renamed

VERSION, STEPS = 4, 3
MODES: dict[str, dict[str, Any]] = {
    "rollout": {},
    "version_start": {"old_log_prob": "version_start"},
    "exact": {"old_log_prob": "decoupled"},
    "loglinear": {"old_log_prob": "decoupled", "proximal": "loglinear"},
}
every_mode = pytest.mark.parametrize("mode", MODES)
exact_modes = pytest.mark.parametrize("mode", ["version_start", "exact"])


def rank_of(folder: Path, mode: str, steps: int = STEPS, **settings: Any) -> PolicyRank:
    algorithm = AlgorithmConfig.model_validate({**MODES[mode], **settings})
    return make_rank(folder, algorithm, steps_per_version=steps, learning_rate=5e-4)


def aged(group: Group, age: int) -> Group:
    """The first token of each response is of an older version than the others."""

    def spans(rollout: Rollout) -> tuple[VersionSpan, ...]:
        length = len(rollout.token_ids)
        return VersionSpan(VERSION - age, 0, 1), VersionSpan(VERSION, 1, length)

    return Group(group.prompt, tuple(replace(rollout, versions=spans(rollout)) for rollout in group.rollouts))


def sampled_by(model: torch.nn.Module, group: Group, shift: float = 0.0) -> Group:
    """The group with log-probs of the model, shifted by up to so much."""
    rollouts = []
    for index, rollout in enumerate(group.rollouts):
        with torch.no_grad():
            exact = plain_log_probs(model, group, rollout).numpy()
        noise = np.random.default_rng(index).uniform(-shift, shift, len(exact))
        rollouts.append(replace(rollout, log_probs=(exact + noise).astype(np.float32)))
    return Group(group.prompt, tuple(rollouts))


def step_groups(model: torch.nn.Module, shift: float = 0.6) -> list[Group]:
    return [sampled_by(model, aged(group, age), shift) for age, group in enumerate(random_groups(4))]


def batches_for(groups: list[Group], max_tokens: int = 60, ranks: int = 1) -> list[list[MicroBatch]]:
    return batches_of(groups, random_advantages(groups), max_tokens, ranks)


def advance(rank: PolicyRank, groups: list[Group], steps: int) -> None:
    """Make optimizer steps of the version, and enter the next one."""
    for _ in range(steps):
        rank.update(batches_for(groups)[0], step_denominator(groups, "token"), VERSION)
    rank.start.enter(VERSION)


def gradients(rank: PolicyRank, batches: list[MicroBatch], denominator: float) -> dict[str, Tensor]:
    rank.optimizer.zero_grad()
    for batch, start in zip(batches, rank.start_log_probs(batches, Timings()), strict=True):
        if len(batch.targets):
            rank.backward(batch, denominator, start=start)
    return {name: parameter.grad.clone() for name, parameter in rank.parameters.items()}


def plain_old(mode: str, start: Tensor, new: Tensor, rollout: Rollout, step: int) -> Tensor:
    """Each token by itself."""
    sampled = torch.from_numpy(rollout.log_probs)
    if mode == "rollout":
        return sampled
    if mode != "loglinear" or step == 0:
        return start
    old = []
    for index, version in enumerate(rollout.token_versions.tolist()):
        share = (VERSION - version) / (VERSION + step / STEPS - version)
        old.append((1 - share) * sampled[index] + share * new[index].detach())
    return torch.stack(old)


def plain_gradients(rank: PolicyRank, start: torch.nn.Module, groups: list[Group], mode: str) -> dict[str, Tensor]:
    """The objective of AReaL's equation 5, or its special case without weights."""
    rank.optimizer.zero_grad()
    denominator = step_denominator(groups, "token")
    for group, advantages in zip(groups, random_advantages(groups), strict=True):
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            new = plain_log_probs(rank.model, group, rollout)
            with torch.no_grad():
                old = plain_old(mode, plain_log_probs(start, group, rollout), new, rollout, rank.start.step)
                weight = (old - torch.from_numpy(rollout.log_probs)).exp().clamp(max=2.0)
            ratio = (new - old).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                objective = objective.clamp(min=3.0 * advantage)
            if mode in ("exact", "loglinear"):
                objective = weight * objective
            (-(objective * torch.from_numpy(rollout.loss_mask)).sum() / denominator).backward()
    return {name: parameter.grad.clone() for name, parameter in rank.parameters.items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-3
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=5e-6, msg=lambda text, n=name: f"{n}: {text}")


@every_mode
@pytest.mark.parametrize("step", range(STEPS))
def test_gradient_equals_the_plain_one_at_every_step_of_a_version(llama: Path, mode: str, step: int) -> None:
    rank = rank_of(llama, mode)
    start, groups = copy.deepcopy(rank.model), step_groups(rank.model)
    advance(rank, groups, step)
    found = gradients(rank, batches_for(groups)[0], step_denominator(groups, "token"))
    assert_close(found, plain_gradients(rank, start, groups, mode))


def test_the_modes_differ_once_the_policy_has_moved(llama: Path) -> None:
    found = []
    for mode in MODES:
        rank = rank_of(llama, mode)
        groups = step_groups(rank.model)
        rank.update(batches_for(groups)[0], 1e3, VERSION)
        found.append(rank.update(batches_for(groups)[0], 1e3, VERSION)["loss"])
    assert min(abs(one - other) for i, one in enumerate(found) for other in found[:i]) > 1e-5


@every_mode
@pytest.mark.parametrize("step", [0, 1])
def test_with_the_policy_unchanged_every_mode_is_the_policy_gradient(llama: Path, mode: str, step: int) -> None:
    rank = rank_of(llama, mode)
    groups = step_groups(rank.model, shift=0)
    for _ in range(step):  # a step without targets counts and leaves the policy unchanged
        rank.update([MicroBatch.of([])], 1.0, VERSION)
    rank.start.enter(VERSION)
    denominator = step_denominator(groups, "token")
    found = gradients(rank, batches_for(groups)[0], denominator)
    rank.optimizer.zero_grad()
    for group, advantages in zip(groups, random_advantages(groups), strict=True):
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            learned = plain_log_probs(rank.model, group, rollout) * torch.from_numpy(rollout.loss_mask)
            (-advantage * learned.sum() / denominator).backward()
    assert_close(found, {name: parameter.grad for name, parameter in rank.parameters.items()})


@every_mode
@pytest.mark.parametrize(("max_tokens", "ranks"), [(25, 1), (1, 1), (60, 3)])
def test_gradient_is_the_same_for_every_split(llama: Path, mode: str, max_tokens: int, ranks: int) -> None:
    rank = rank_of(llama, mode)
    groups = step_groups(rank.model)
    advance(rank, groups, 1)
    denominator = step_denominator(groups, "token")
    whole = gradients(rank, batches_for(groups, 1000)[0], denominator)
    parts = [gradients(rank, share, denominator) for share in batches_for(groups, max_tokens, ranks)]
    assert_close({name: sum(part[name] for part in parts) for name in whole}, whole)


@every_mode
def test_sequences_have_equal_weight_in_every_mode(llama: Path, mode: str) -> None:
    rank = rank_of(llama, mode)
    groups = step_groups(rank.model)
    found = gradients(rank, batches_of(groups, random_advantages(groups), 60, aggregation="sequence")[0], 50.0)
    parts = []
    for group, advantages in zip(groups, random_advantages(groups), strict=True):
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            alone = batches_of([Group(group.prompt, (rollout,))], [advantage[None]], 60)[0]
            parts.append(gradients(rank, alone, 50.0 * np.count_nonzero(rollout.loss_mask)))
    assert_close(found, {name: sum(part[name] for part in parts) for name in found})


def test_a_kl_penalty_is_not_weighted(llama: Path) -> None:
    found = []
    for mode in ("rollout", "exact"):
        rank = rank_of(llama, mode, kl_loss_coef=0.5)
        groups = step_groups(rank.model)
        with torch.no_grad():  # away from the reference, where the penalty has no slope
            for parameter in rank.parameters.values():
                parameter.mul_(1.05)
        nothing = [np.zeros(len(group.rollouts), np.float32) for group in groups]
        found.append(gradients(rank, batches_of(groups, nothing, 60, keep_all=True)[0], 50.0))
    assert_close(*found)


@exact_modes
def test_the_clip_counts_from_the_start_of_the_version(llama: Path, mode: str) -> None:
    rank = rank_of(llama, mode)
    groups = step_groups(rank.model)
    (batches,), denominator = batches_for(groups), step_denominator(groups, "token")
    first = rank.log_probs(batches)
    one = rank.update(batches, denominator, VERSION)
    assert (one["ratio/mean"], one["ratio/clip_fraction"], one["kl/old_new"]) == (1, 0, 0)
    second = rank.log_probs(batches)
    two = rank.update(batches, denominator, VERSION)
    ratio = np.exp(np.concatenate(second) - np.concatenate(first))
    assert two["ratio/mean"] == pytest.approx(ratio.mean(), rel=1e-4) != 1
    assert rank.update(batches, denominator, VERSION + 1)["ratio/mean"] == 1


@every_mode
@pytest.mark.parametrize("steps", [1, STEPS])
def test_parameters_are_copied_once_a_version_and_never_with_one_step(llama: Path, mode: str, steps: int) -> None:
    rank = rank_of(llama, mode, steps)
    groups = step_groups(rank.model)
    copied = []
    for step in range(2 * STEPS):
        with Copies([*rank.parameters.values(), *rank.start.copies.values()]) as copies:
            rank.update(batches_for(groups)[0], 50.0, step // steps)
        copied.append(copies.nbytes)
    nbytes = sum(parameter.nbytes for parameter in rank.parameters.values())
    once = [nbytes, 0, 0] if steps > 1 and mode in ("version_start", "exact") else [0, 0, 0]
    assert copied == once * 2
    assert sum(kept.nbytes for kept in rank.start.copies.values()) == max(once)


@every_mode
def test_the_old_policy_gets_a_forward_pass_only_if_it_is_not_the_current_one(llama: Path, mode: str) -> None:
    rank = rank_of(llama, mode, 2)
    groups = step_groups(rank.model)
    passes = ["time/old_log_prob" in rank.update(batches_for(groups)[0], 50.0, version) for version in (0, 0, 1, 1)]
    assert passes == [mode in ("version_start", "exact") and step % 2 == 1 for step in range(4)]


def test_the_interpolated_policy_is_nearer_to_the_exact_one_than_the_sampling_policy(llama: Path) -> None:
    exact = rank_of(llama, "exact")
    groups = [sampled_by(exact.model, aged(group, 2)) for group in random_groups(4)]
    interpolated = rank_of(llama, "loglinear")
    for rank in (exact, interpolated):  # versions 2, 3 and half of 4, all on the same groups
        rank.start.steps = 2
        for version in (VERSION - 2, VERSION - 2, VERSION - 1, VERSION - 1, VERSION):
            rank.update(batches_for(groups)[0], 50.0, version)
        rank.start.enter(VERSION)
    (batch,) = batches_for(groups, 1000)[0]
    olds = []
    for rank in (exact, interpolated):
        (start,), (present,) = rank.start_log_probs([batch], Timings()), rank.log_probs([batch])
        sampled = torch.from_numpy(batch.targets.old_log_probs)
        olds.append(rank.old_log_probs(batch, torch.from_numpy(present), sampled, start))
    first = torch.from_numpy(batch.targets.versions) < VERSION
    near, far = ((olds[0] - other)[first].abs().mean() for other in (olds[1], sampled))
    assert near < far


def test_the_metrics_of_the_correction_are_those_of_the_tokens(llama: Path) -> None:
    rank = rank_of(llama, "exact", rollout_correction={"rollout_is_threshold": 1.3})
    groups = step_groups(rank.model)
    (batches,) = batches_for(groups)
    gap = np.concatenate(rank.log_probs(batches)) - np.concatenate([b.targets.old_log_probs for b in batches])
    found = rank.update(batches, 50.0, VERSION)
    assert found["correction/old_rollout_gap"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    assert found["correction/weight_mean"] == pytest.approx(np.minimum(np.exp(gap), 1.3).mean(), rel=1e-4)
    assert found["correction/weight_max"] == pytest.approx(np.exp(gap).max(), rel=1e-4)
    assert found["correction/truncated_ratio"] == pytest.approx((np.exp(gap) > 1.3).mean()) != 0


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("rollout", set()),
        ("version_start", set()),
        ("loglinear", {"weight_mean", "weight_max", "truncated_ratio", "rejected_ratio", "effective_sample_size"}),
    ],
)
def test_a_mode_reports_its_metrics_also_in_a_skipped_step(llama: Path, mode: str, names: set[str]) -> None:
    zero = {"old_rollout_gap", "kl", "k3_kl", "chi2_token", "chi2_sequence"}
    names = names | zero | {"perplexity", "rollout_perplexity"}
    rank = rank_of(llama, mode)
    groups = step_groups(rank.model)
    for batches in (batches_for(groups)[0], [MicroBatch.of([])]):
        found = rank.update(batches, 50.0, VERSION)
        assert {name.removeprefix("correction/") for name in found if name.startswith("correction/")} == names
    one = {"perplexity", "rollout_perplexity", "weight_mean"}
    neutral = {name: 1 if name in one else 0 for name in names}  # of no token at all
    assert {name: found[f"correction/{name}"] for name in names} == {name: neutral[name] for name in names}


def test_a_skipped_step_does_not_raise_the_largest_weight(llama: Path) -> None:
    rank = rank_of(llama, "exact")
    groups = [sampled_by(rank.model, group) for group in random_groups(2)]
    likelier = [
        Group(g.prompt, tuple(replace(r, log_probs=r.log_probs + np.float32(0.5)) for r in g.rollouts)) for g in groups
    ]
    found = [rank.update(batches, 50.0, VERSION) for batches in (batches_for(likelier)[0], [MicroBatch.of([])])]
    assert found[0]["correction/weight_max"] == pytest.approx(np.exp(-0.5), rel=1e-3)
    assert aggregate([renamed(report) for report in found])["correction/weight_max"] == pytest.approx(
        np.exp(-0.5), rel=1e-3
    )


def test_every_metric_of_an_update_is_documented(llama: Path) -> None:
    rank = rank_of(llama, "exact")
    groups = step_groups(rank.model)
    reports = [rank.update(batches_for(groups)[0], 50.0, VERSION) for _ in range(2)]
    page = Path(__file__).parents[2].joinpath("docs/metrics.md").read_text(encoding="utf-8")
    assert "time/old_log_prob" in reports[1]
    assert [name for name in renamed(reports[1]) if f"`{name}`" not in page] == []


def test_a_restart_begins_a_version_with_what_it_loads(llama: Path, tmp_path: Path) -> None:
    rank = rank_of(llama, "version_start")
    groups = step_groups(rank.model)
    advance(rank, groups, 1)
    rank.save_state(tmp_path)
    rank.load_state(tmp_path)
    assert rank.update(batches_for(groups)[0], 50.0, VERSION)["ratio/mean"] == 1
