from __future__ import annotations

import numpy as np

from tidemill.records import FinishReason, Group, Prompt, Rollout, VersionSpan
from tidemill.rollout.activity import IdleMeter, LoadMeter, Tally


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_time_is_exact_over_scripted_pauses() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    # idle 2, one running 3, two running 1, one running 4, idle 5, running 5: 7 of 20
    for seconds, change in [
        (2, meter.enter), (3, meter.enter), (1, meter.leave), (4, meter.leave), (5, meter.enter), (5, None),
    ]:  # fmt: skip
        clock.now += seconds
        if change is not None:
            change()
    assert meter.read() == 7 / 20


def test_each_reading_starts_anew_in_the_middle_of_a_pause() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    clock.now += 4
    assert meter.read() == 1.0
    clock.now += 1
    meter.enter()
    clock.now += 3
    assert meter.read() == 0.25
    assert meter.read() == 0.0


def test_a_finished_run_is_not_idle() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    meter.enter()
    clock.now += 1
    meter.leave()
    meter.finish()
    clock.now += 50
    assert meter.read() == 0.0


def test_loads_are_changes_since_the_last_report_and_close_ones_become_one() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for seconds, engine, requests in [(0, "a", 1), (0.01, "a", 2), (1, "b", 1), (1, "a", 1)]:
        clock.now += seconds
        meter.note(engine, requests)
    assert meter.take() == {"a": [(100.0, 2), (102.01, 1)], "b": [(101.01, 1)]}
    assert meter.take() == {}


def scored(*rollouts: tuple[dict[str, float], int, bool], newest: int = 0) -> Group:
    """Rollouts of (parts of the reward, tokens, truncated); the last token of each is of version `newest`."""
    made = []
    for parts, length, truncated in rollouts:
        ids, values = np.zeros(length, np.int32), np.zeros(length, np.float32)
        spans = (VersionSpan(0, 0, length - 1), VersionSpan(newest, length - 1, length))
        end: FinishReason = "length" if truncated else "stop"
        made.append(Rollout(ids, values, values, spans, end, "", sum(parts.values()), parts, 1.0))
    return Group(Prompt(0, 0, np.zeros(1, np.int32), ""), tuple(made))


def test_rollouts_need_not_have_the_same_parts_of_a_reward() -> None:
    tally = Tally()
    tally.group(scored(({"f/format": 0.5, "f/right": 1.0}, 2, False), ({"f/format": 0.5}, 2, False)), 1.0)
    tally.group(scored(({"f/late": -1.0}, 2, False), ({}, 2, False)), 1.0)
    report = tally.take()
    assert [report[f"reward/f/{name}"] for name in ("format", "right", "late")] == [0.25, 0.25, -0.25]
    assert report["reward/mean"] == 0.25


def test_finished_groups_are_counted_and_averaged() -> None:
    tally = Tally()
    tally.group(scored(({"f": 0.0}, 2, False), ({"f": 2.0}, 4, True)), 3.0)
    tally.group(scored(({"f": 1.0}, 4, True), ({"f": 1.0}, 4, True), newest=1), 5.0)
    assert tally.take() == {
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
    assert tally.take() == {"generated_groups": 0.0, "generated_tokens": 0.0}
