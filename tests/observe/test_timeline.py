"""Timelines of scripted steps; times are seconds since the epoch."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tidemill.cli import main
from tidemill.errors import DataError
from tidemill.observe.events import Activity, EventLog, Notice, StepFinished
from tidemill.observe.timeline import Load, last_steps, loads, newest_attempt, overlap, phases, svg, trace

# Two updates, 110..114 and 120..124. Engine 0 is busy 104..112 and 122..130, engine 1 from 123 on; the end is at 126.
STEPS = [
    Activity(1, [["get_groups", 100, 110], ["update_actor", 110, 114], ["step", 100, 116]],
             {"engine 0": [[104, 2], [108, 1], [112, 0]]}),
    Activity(2, [["get_groups", 116, 120], ["update_actor", 120, 124], ["sync_adopt", 125, 126], ["sync", 124, 126]],
             {"engine 0": [[122, 1], [130, 0]], "engine 1": [[123, 3]]}),
]  # fmt: skip
NAMESPACE = "{http://www.w3.org/2000/svg}"


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


def test_only_the_newest_attempt_is_drawn() -> None:
    resumed = [*STEPS, Notice("resumed"), Activity(2, [["sync", 200, 201]], {}), Activity(3, [["sync", 202, 203]], {})]
    assert [activity.step for activity in newest_attempt(resumed)] == [2, 3]
    assert [activity.step for activity in last_steps(newest_attempt(resumed), 1)] == [3]


def test_without_a_step_there_is_nothing_to_draw() -> None:
    with pytest.raises(DataError, match="no step"):
        last_steps(newest_attempt([StepFinished(1, 1, 1, 1.0, {}, 0.0)]), None)


def test_picture_shows_phases_to_scale_and_says_the_overlap() -> None:
    root = ElementTree.fromstring(svg(STEPS))
    bars = {bar[0].text: float(bar.get("width", 0)) for bar in root.iter(f"{NAMESPACE}rect") if len(bar)}
    assert bars["step 1: get_groups 10.00 s"] == pytest.approx(2.5 * bars["step 2: update_actor 4.00 s"], rel=0.01)
    words = [element.text for element in root.iter(f"{NAMESPACE}text")]
    assert {"trainer", "engine 0", "engine 1"} <= set(words)
    assert any("50%" in str(word) for word in words)


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
    assert (tmp_path / "timeline.svg").read_text() == svg(STEPS)
    assert main(["timeline", str(tmp_path), "--last", "1", "--output", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_text() == trace(STEPS[1:])
    assert main(["timeline", str(tmp_path), "--output", "t.bmp"]) == 2
    assert main(["timeline", str(tmp_path / "missing")]) == 2
