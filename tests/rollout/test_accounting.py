"""Waste, idle time, and the metrics of finished groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rollout_rig import BROKEN, LengthReward, Rig, run_config

from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling
from tidemill.records import Completion, FinishReason, Group, Int32Array, Prompt, Rollout, VersionSpan
from tidemill.rollout.accounting import IdleMeter, RolloutMetrics
from tidemill.rollout.group_request import Timeouts

pytestmark = pytest.mark.own_time


class Unreliable(FakeEngine):
    """Aborts the first request of occurrence 2, and exceeds the time-out with occurrence 3."""

    def __init__(self) -> None:
        super().__init__(token_delay_s=0.005)

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        uid = int(request_id.partition(".")[0])
        self._lengths = (500, 500) if uid == 3 else (4, 4)  # the superclass reads it before it awaits
        completions = await super().generate(request_id, prompt_ids, sampling)
        first = [name for name, _ in self.requests if name.startswith("2.")] == [request_id]
        return [replace(c, finish_reason="abort") for c in completions] if first else completions


async def test_tokens_of_failed_attempts_are_waste() -> None:
    rollout = {"max_new_tokens": 500, "group_timeout_s": 1.0, "max_attempts": 2}
    config = run_config(rollout=rollout, asynchrony={"max_staleness": 0})
    rig = Rig(config, engines=[Unreliable()], rewards=LengthReward({1: BROKEN}), timeouts=Timeouts(answer_s=30.0))
    assert await rig.run() == 5
    assert rig.ledger.quarantined.items() >= {1: "reward_error", 3: "timeout"}.items()
    assert rig.ledger.counts()["dropped/aborted"] == 1
    sampled = (await rig.engines[0].stats())["generated_tokens"]
    trained = sum(group.response_tokens for group in rig.trained)
    assert (await rig.rollouter.stats())["wasted_tokens"] == sampled - trained > 2 * 2 * 4 + 2 * 4


@pytest.mark.parametrize(("bound", "seeded"), [(0, True), (1, False)])
async def test_only_a_synchronous_run_is_seeded(bound: int, seeded: bool) -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": bound}))
    await rig.run()
    seeds = [sampling.seed for _, sampling in rig.engines[0].requests]
    assert (len(set(seeds)), None in seeds) == ((20, False) if seeded else (1, True))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_time_is_exact_over_scripted_pauses() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    clock.now += 2
    with meter.activity():
        clock.now += 3
        with meter.activity():
            clock.now += 1
        clock.now += 4
    clock.now += 5
    with meter.activity():
        clock.now += 5
        assert meter.read() == 7 / 20


def test_each_reading_starts_anew_in_the_middle_of_a_pause() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    clock.now += 4
    assert meter.read() == 1.0
    clock.now += 1
    with meter.activity():
        clock.now += 3
        assert meter.read() == 0.25
        assert meter.read() == 0.0


def test_a_finished_run_is_not_idle() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    with meter.activity():
        clock.now += 1
    meter.finish()
    clock.now += 50
    assert meter.read() == 0.0


def scored(*rollouts: tuple[dict[str, float], int, bool], newest: int = 0) -> Group:
    """Rollouts of (parts of the reward, tokens, truncated); the last token of each is of version `newest`."""
    made = []
    for parts, length, truncated in rollouts:
        ids, values = np.zeros(length, np.int32), np.zeros(length, np.float32)
        spans = (VersionSpan(0, 0, length - 1), VersionSpan(newest, length - 1, length))
        end: FinishReason = "length" if truncated else "stop"
        made.append(Rollout(ids, values, values, spans, end, "", sum(parts.values()), parts, 1.0))
    return Group(Prompt(0, 0, np.zeros(1, np.int32), ""), tuple(made))


def test_a_part_of_a_reward_that_a_rollout_lacks_counts_as_zero() -> None:
    metrics = RolloutMetrics()
    metrics.add_group(scored(({"f/format": 0.5, "f/right": 1.0}, 2, False), ({"f/format": 0.5}, 2, False)), 1.0)
    metrics.add_group(scored(({"f/late": -1.0}, 2, False), ({}, 2, False)), 1.0)
    report = metrics.take()
    assert [report[f"reward/f/{name}"] for name in ("format", "right", "late")] == [0.25, 0.25, -0.25]
    assert report["reward/mean"] == 0.25


def test_finished_groups_are_counted_and_averaged() -> None:
    metrics = RolloutMetrics()
    metrics.add_group(scored(({"f": 0.0}, 2, False), ({"f": 2.0}, 4, True)), 3.0)
    metrics.add_group(scored(({"f": 1.0}, 4, True), ({"f": 1.0}, 4, True), newest=1), 5.0)
    assert metrics.take() == {
        "reward/mean": 1.0,
        "reward/std_in_group": 0.5,
        "response_length/mean": 3.5,
        "truncated": 0.75,
        "group_seconds/mean": 4.0,
        "reward/f": 1.0,
        "generated_groups": 2.0,
        "generated_tokens": 14.0,
        "updated_midway": 1.0,
    }
    assert metrics.take() == {"generated_groups": 0.0, "generated_tokens": 0.0}
