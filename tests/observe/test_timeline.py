"""Timelines of scripted steps; times are seconds since the epoch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.cli.main import main
from tidemill.errors import DataError
from tidemill.observe.charts import timeline_svg
from tidemill.observe.events import Activity, EventLog, Notice, StepFinished
from tidemill.observe.timeline import (
    ADOPT,
    Load,
    adoptions,
    common,
    last_steps,
    loads,
    newest_attempt,
    overlap,
    phases,
    trace,
)

# Two updates, 110..114 and 120..124. Engine 0 is busy 104..112 and 122..130, engine 1 from 123 on; the end is at 126.
STEPS = [
    Activity(1, [["get_groups", 100, 110], ["update_actor", 110, 114], ["step", 100, 116]],
             {"engine 0": [[104, 2], [108, 1], [112, 0]]}),
    Activity(2, [["get_groups", 116, 120], ["update_actor", 120, 124], ["sync_adopt", 125, 126], ["sync", 124, 126]],
             {"engine 0": [[122, 1], [130, 0]], "engine 1": [[123, 3]]}),
]  # fmt: skip


def test_requests_in_flight_are_constant_between_changes_and_end_with_the_last_step() -> None:
    assert loads(STEPS) == {
        "engine 0": [Load(104, 108, 2), Load(108, 112, 1), Load(122, 126, 1)],
        "engine 1": [Load(123, 126, 3)],
    }


def test_overlap_counts_updates_during_which_any_engine_generates() -> None:
    # 110..112 of the first and 122..124 of the second update, engine 1 not counted twice: 4 of 8 seconds
    assert overlap(STEPS) == 0.5
    assert overlap([Activity(1, [["get_groups", 0, 1]], {})]) == 0.0


def test_phases_inside_others_are_left_out() -> None:
    assert [(p.name, p.step) for p in phases(STEPS)] == [
        ("get_groups", 1), ("update_actor", 1), ("get_groups", 2), ("update_actor", 2), ("sync", 2)
    ]  # fmt: skip


def test_adoptions_are_beside_the_trainer_within_its_time() -> None:
    late = [[ADOPT, 90, 105], [ADOPT, 118.5, 121], [ADOPT, 125, 140]]
    steps = [STEPS[0], replace(STEPS[1], phases=[*STEPS[1].phases, *late])]
    assert adoptions(steps) == [Load(100, 105, 1), Load(118.5, 121, 1), Load(125, 126, 1)]
    assert phases(steps) == phases(STEPS)
    assert overlap(steps) == overlap(STEPS)
    traced = [event for event in json.loads(trace(steps))["traceEvents"] if event["name"] == "engines adopt"]
    assert [(event["ts"], event["dur"]) for event in traced] == [(0, 5e6), (18.5e6, 2.5e6), (25e6, 1e6)]


def test_a_timeline_is_that_of_the_newest_attempt() -> None:
    second = [Activity(step, [["sync", 200 + step, 201 + step]], {}, attempt=150.0) for step in (2, 3)]
    resumed = [*STEPS, Notice("resumed"), *second]
    assert [activity.step for activity in newest_attempt(resumed)] == [2, 3]
    assert [activity.step for activity in last_steps(newest_attempt(resumed), 1)] == [3]


def test_attempts_with_consecutive_steps_are_distinguished() -> None:
    # The engine of the first was busy when it was cut; nothing was in flight until the second began.
    first = Activity(1, [["sync", 100, 101]], {"engine 0": [[100.5, 16]]}, attempt=90.0)
    second = Activity(2, [["sync", 200, 201]], {}, attempt=190.0)
    assert loads(newest_attempt([first, second])) == {}


def test_a_timeline_needs_a_finished_step() -> None:
    with pytest.raises(DataError, match="not finished a step"):
        last_steps(newest_attempt([StepFinished(1, 1, 1, 1.0, {}, 0.0)]), None)


def test_the_last_steps_begin_with_the_groups_in_flight() -> None:
    # engine 0 has had two requests in flight since 104, and nothing of it changes in the second step
    steps = [replace(STEPS[0], loads={"engine 0": [[104, 2]]}), replace(STEPS[1], loads={"engine 1": [[123, 3]]})]
    kept = last_steps(steps, 1)
    assert loads(kept) == {"engine 0": [Load(116, 126, 2)], "engine 1": [Load(123, 126, 3)]}
    assert overlap(kept) == 1.0
    assert last_steps(steps, None) == steps


def test_engines_are_ordered_by_number() -> None:
    steps = [replace(STEPS[0], loads={f"engine {n}": [[104, 1]] for n in (10, 2, 0)})]
    assert list(loads(steps)) == ["engine 0", "engine 2", "engine 10"]


def test_common_time_equals_a_pairwise_comparison() -> None:
    first, second = [(0, 3), (4, 8), (9, 10)], [(1, 2), (2.5, 5), (6, 7), (7.5, 20)]
    assert common(first, second) == sum(max(0, min(e, b) - max(s, a)) for s, e in first for a, b in second) == 5


def test_trace_has_microseconds_since_the_first_step() -> None:
    events = json.loads(trace(STEPS))["traceEvents"]
    [update, _] = [event for event in events if event["name"] == "update_actor"]
    assert (update["ts"], update["dur"], update["args"]) == (10_000_000, 4_000_000, {"step": 1})
    counted = [(e["ts"], e["args"]["in flight"]) for e in events if e["name"] == "engine 1"]
    assert counted == [(23_000_000, 3), (26_000_000, 0)]


def test_the_command_draws_a_run_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        for activity in STEPS:
            log.write(activity)
    assert main(["timeline", str(tmp_path)]) == 0
    assert "50%" in capsys.readouterr().out
    assert (tmp_path / "timeline.svg").read_text() == timeline_svg(STEPS)
    assert main(["timeline", str(tmp_path), "--last", "1", "--output", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_text() == trace(STEPS[1:])
    assert main(["timeline", str(tmp_path), "--output", "t.bmp"]) == 2
    assert main(["timeline", str(tmp_path / "missing")]) == 2
