"""Stale tokens are masked, and the loss depends on the other tokens only."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_rig import Loop
from rollout_rig import Rig, run_config
from test_old_log_probs import MODES, assert_close, gradients, sampled_by
from torch import Tensor
from train_rig import (
    VOCABULARY,
    batches_of,
    make_group,
    make_rank,
    make_rollout,
    plain_log_probs,
    random_advantages,
    random_groups,
)

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.fakes import FakeEngine
from tidemill.records import Float32Array, Group, Int32Array, Rollout, VersionSpan
from tidemill.train.batch import mask_stale, step_denominator
from tidemill.train.policy import PolicyRank

PRESENT, BOUND, STEPS = 6, 1, 3


def spanned(rollout: Rollout, *counts: tuple[int, int]) -> Rollout:
    """With tokens of these (version, number of tokens)."""
    ends = np.cumsum([count for _, count in counts]).tolist()
    spans = (VersionSpan(version, end - count, end) for (version, count), end in zip(counts, ends, strict=True))
    return replace(rollout, versions=tuple(spans))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    first = draw(st.integers(0, 5))
    tokens = sum(counts)
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=tokens, max_size=tokens))
    return spanned(make_rollout(range(tokens), mask), *((first + n, count) for n, count in enumerate(counts)))


@given(st.lists(rollouts(), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 3))
def test_exactly_the_stale_tokens_are_masked(members: list[Rollout], ahead: int, bound: int) -> None:
    group = make_group(0, [1], *members)
    version = group.newest_version + ahead
    masked = mask_stale(group, version, bound)
    assert masked.age(version) <= bound
    assert masked.trained_tokens == sum(
        mask == 1.0 and version - sampled <= bound
        for member in members
        for mask, sampled in zip(member.loss_mask, member.token_versions, strict=True)
    )
    for before, after in zip(members, masked.rollouts, strict=True):
        recent = version - before.token_versions <= bound
        assert np.array_equal(after.loss_mask, np.where(recent, before.loss_mask, 0))
        assert after.loss_mask.dtype == np.float32
        assert after.token_ids is before.token_ids
        assert after.log_probs is before.log_probs


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_gradient_is_that_of_the_recent_tokens_with_the_old_ones_as_prompt(llama: Path, aggregation: Any) -> None:
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(3, VOCABULARY, 4).tolist(), rng.integers(3, VOCABULARY, 7).tolist()
    whole = make_rollout(tokens)
    stale = mask_stale(make_group(0, prompt, spanned(whole, (2, 3), (4, 4))), version=5, max_staleness=1)
    recent = replace(make_rollout(tokens[3:]), log_probs=whole.log_probs[3:])
    after = make_group(0, prompt + tokens[:3], recent)
    found, wanted = (
        gradients(
            rank := make_rank(llama),
            batches_of([group], [np.array([0.7], np.float32)], 200, aggregation=aggregation)[0],
            step_denominator([group], aggregation),
        )
        for group in (stale, after)
    )
    assert rank is not None
    assert step_denominator([stale], "token") == 4
    assert_close(found, wanted)


def met_updates(group: Group) -> Group:
    """Tokens of random versions up to the current one, in order; some responses are entirely old."""
    rng, rollouts = np.random.default_rng(group.uid), []
    for rollout in group.rollouts:
        versions = np.sort(rng.integers(PRESENT - 3, PRESENT + rng.integers(-1, 2), len(rollout.token_ids))).tolist()
        everything = replace(rollout, loss_mask=np.ones(len(versions), np.float32))
        rollouts.append(spanned(everything, *Counter(versions).items()))
    return replace(group, rollouts=tuple(rollouts))


KL = {"kl_loss_coef": 0.3, "kl_loss_type": "k3"}


def plain_gain(algorithm: AlgorithmConfig, new: Tensor, began: Tensor, sampled: float, share: float) -> Any:
    """The clipped gain of one token as a function of its advantage, and the weight that corrects for its age."""
    old = began
    if algorithm.old_log_prob == "rollout":
        old = torch.tensor(sampled)
    if algorithm.proximal == "loglinear":
        old = (1 - share) * sampled + share * new.detach()
    weight = min((old - sampled).exp().item(), 2.0) if algorithm.old_log_prob == "decoupled" else 1.0
    ratio = (new - old).exp()

    def gain(advantage: float) -> Tensor:
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return weight * (clipped.clamp(min=3.0 * advantage) if advantage < 0 else clipped)

    return gain


def plain_loss(rank: PolicyRank, start: Any, group: Group, advantages: Float32Array) -> tuple[Any, int]:
    """The objective over the recent tokens, one by one, and its denominator."""
    algorithm, done = rank.algorithm, rank.start.done
    losses, counts = [], []
    for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
        new = plain_log_probs(rank.model, group, rollout)
        with torch.no_grad():
            began, reference = (plain_log_probs(model, group, rollout) for model in (start, rank.reference.model))
        terms = []
        for at, version in enumerate(rollout.token_versions.tolist()):
            if PRESENT - version <= BOUND:
                share = (PRESENT - version) / (PRESENT + done - version) if done else 1.0
                gain = plain_gain(algorithm, new[at], began[at], rollout.log_probs[at].item(), share)(advantage)
                apart = reference[at] - new[at]
                terms.append(algorithm.kl_loss_coef * (apart.exp() - 1 - apart) - gain)
        counts.append(len(terms))
        losses += [sum(terms) / (len(terms) if algorithm.aggregation == "sequence" else 1)] if terms else []
    return sum(losses), sum(counts) if algorithm.aggregation == "token" else len(losses)


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_equals_the_plain_objective_over_the_recent_tokens(
    llama: Path, mode: str, aggregation: Any, done: int
) -> None:
    algorithm = AlgorithmConfig.model_validate({**MODES[mode], "aggregation": aggregation, **KL})
    rank = make_rank(llama, algorithm, steps_per_version=STEPS, learning_rate=5e-4)
    groups = [sampled_by(rank.model, met_updates(group), shift=0.6) for group in random_groups(5)]
    masked, advantages = [mask_stale(group, PRESENT, BOUND) for group in groups], random_advantages(groups)
    batches = batches_of(masked, advantages, 40, aggregation=aggregation, keep_all=True)[0]
    denominator = step_denominator(masked, aggregation)
    start = copy.deepcopy(rank.model)
    for _ in range(done):
        rank.update(batches, denominator, PRESENT)
    rank.start.enter(PRESENT)
    found = gradients(rank, batches, denominator)
    rank.optimizer.zero_grad()
    plain = [plain_loss(rank, start, group, values) for group, values in zip(groups, advantages, strict=True)]
    assert sum(count for _, count in plain) == denominator
    (sum(loss for loss, _ in plain) / denominator).backward()
    assert_close(found, {name: parameter.grad for name, parameter in rank.parameters.items()})


def long_ones(prompt_ids: Int32Array, version: int, sample: int) -> list[int]:
    """Every fourth row has one response that lasts for several versions."""
    row = int("".join(chr(token) for token in prompt_ids if chr(token).isdigit()))
    return [1] * (60 if row % 4 == 3 and sample else 2)


async def test_a_run_trains_only_recent_tokens_and_reports_the_masked_ones() -> None:
    config = run_config(asynchrony={"staleness_strategy": "mask"}, trainer={"steps": 10})
    loop = Loop(Rig(config, engines=[FakeEngine(script=long_ones) for _ in range(2)]))
    await loop.fit()
    left_out = [metrics["staleness/masked_tokens"] for metrics in loop.metrics]
    too_old = [old_tokens(moment.groups, moment.version) for moment in loop.steps]
    assert left_out == too_old
    assert sum(left_out) > 0
    assert max(metrics["staleness/max"] for metrics in loop.metrics) == loop.position.max_age == 1
    assert [m["response/tokens"] - m["response/trained_tokens"] for m in loop.metrics] == left_out
    assert sum(metrics["response/trained_tokens"] for metrics in loop.metrics) == loop.position.response_tokens
    for metrics in loop.metrics:
        assert metrics["throughput/tokens_per_second"] * metrics["time/step"] == pytest.approx(
            metrics["response/trained_tokens"]
        )


def old_tokens(groups: tuple[Group, ...], version: int) -> int:
    sampled = np.concatenate([rollout.token_versions for group in groups for rollout in group.rollouts])
    return int((version - sampled > 1).sum())
