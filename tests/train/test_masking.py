"""Tokens that became too old: what of a group is left to be trained, and that the loss sees nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_rig import Loop
from rollout_rig import Rig, run_config
from test_policy import assert_equal_gradients, gradients
from train_rig import VOCABULARY, batches_of, make_group, make_rank, make_rollout

from tidemill.fakes import FakeEngine
from tidemill.records import Group, Int32Array, Rollout, VersionSpan
from tidemill.train.batch import step_denominator
from tidemill.train.masking import mask_stale


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
def test_exactly_the_tokens_that_are_too_old_leave_the_loss(members: list[Rollout], ahead: int, bound: int) -> None:
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
        young = version - before.token_versions <= bound
        assert np.array_equal(after.loss_mask, np.where(young, before.loss_mask, 0))
        assert after.loss_mask.dtype == np.float32
        assert after.token_ids is before.token_ids
        assert after.log_probs is before.log_probs


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_gradient_is_that_of_the_young_tokens_after_the_old_ones_as_a_prompt(llama: Path, aggregation: Any) -> None:
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(3, VOCABULARY, 4).tolist(), rng.integers(3, VOCABULARY, 7).tolist()
    whole = make_rollout(tokens)
    stale = mask_stale(make_group(0, prompt, spanned(whole, (2, 3), (4, 4))), version=5, max_staleness=1)
    young = replace(make_rollout(tokens[3:]), log_probs=whole.log_probs[3:])
    after = make_group(0, prompt + tokens[:3], young)
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
    assert_equal_gradients(found, wanted)


def long_ones(prompt_ids: Int32Array, version: int, sample: int) -> list[int]:
    """Every fourth row has one response that lasts for several versions."""
    row = int("".join(chr(token) for token in prompt_ids if chr(token).isdigit()))
    return [1] * (60 if row % 4 == 3 and sample else 2)


async def test_a_run_trains_young_tokens_only_and_says_what_it_left_out() -> None:
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
