"""The event log: readable while it grows and after a crash."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from tidemill.errors import DataError
from tidemill.observe.events import (
    BLOCK,
    Activity,
    EvaluationFinished,
    Event,
    EventLog,
    Notice,
    PhaseFailed,
    PhaseStarted,
    StepFinished,
    event_from_dict,
    event_to_dict,
    follow,
    past_events,
    read_events,
    step_seconds,
)

EVENTS: list[Event] = [
    PhaseStarted("start engines", 1.0),
    StepFinished(1, 25, 1, 2.5, {"reward/mean": 0.5}, 3.0),
    Activity(1, [["sync", 3.5, 4.5]], {"engine 0": [[3.0, 2]]}),
    EvaluationFinished(1, 0.25, [{"prompt": "1 + 1", "response": "2", "expected": "2", "reward": 1.0}], 4.0),
    Notice("prompt 3 is quarantined: «é»\nsecond line"),
    PhaseFailed("train", "engine 0 died", 5.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_events_survive_json(event: Event) -> None:
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event)))) == event


def test_numpy_numbers_become_python_numbers() -> None:
    event = StepFinished(1, 1, 1, 1.0, {"reward/mean": np.float32(0.5)}, 0.0)
    assert json.loads(json.dumps(event_to_dict(event)))["metrics"] == {"reward/mean": 0.5}


@pytest.mark.parametrize(
    "value", [None, {"kind": "other"}, {"kind": "warning"}, {"kind": "warning", "text": "", "more": 1}]
)
def test_a_value_that_is_not_an_event_is_refused(value: object) -> None:
    with pytest.raises(DataError, match="not a"):
        event_from_dict(value)


def test_every_event_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "run/events.jsonl") as log:
        for count, event in enumerate(EVENTS, start=1):
            log.write(event)
            assert read_events(log.path) == EVENTS[:count]


def test_an_incomplete_last_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = json.dumps(event_to_dict(EVENTS[0]))
    path.write_text(line + "\n" + line[:9])
    assert read_events(path) == [EVENTS[0]]
    path.write_text(line + "\n" + line + "\n")
    assert read_events(path) == [EVENTS[0]] * 2


def test_a_restarted_run_continues_after_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(event_to_dict(EVENTS[0])) + '\n{"kind": "war')
    with EventLog(path) as log:
        log.write(EVENTS[1])
    first, broken, last = read_events(path)
    assert (first, last) == (EVENTS[0], EVENTS[1])
    assert isinstance(broken, Notice)
    assert "line 2 is skipped" in broken.text


def test_no_log_is_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none.jsonl") == []


def test_follow_sees_events_while_they_are_written_and_all_before_its_end(tmp_path: Path) -> None:
    path, stop, seen = tmp_path / "events.jsonl", threading.Event(), Queue[Event]()
    reader = threading.Thread(target=lambda: [seen.put(event) for event in follow(path, stop)])
    reader.start()
    with EventLog(path) as log:
        log.write(EVENTS[0])
        assert seen.get(timeout=60) == EVENTS[0]
        for event in EVENTS[1:]:
            log.write(event)
        stop.set()
    reader.join(timeout=60)
    assert [seen.get(timeout=60) for _ in EVENTS[1:]] == EVENTS[1:]


def test_follow_ends_without_a_log(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    assert list(follow(tmp_path / "none.jsonl", stop)) == []


def test_a_log_of_many_blocks_is_read_to_its_end(tmp_path: Path) -> None:
    events = [Notice(f"{n} " + "ü" * (BLOCK // 5)) for n in range(9)]
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in events:
            log.write(event)
    assert (tmp_path / "events.jsonl").stat().st_size > 3 * BLOCK
    assert list(past_events(tmp_path / "events.jsonl")) == events


def test_steps_last_until_the_next_one_and_tries_are_summed() -> None:
    names = ["validate", "provision", "train", "validate", "load", "provision", "train", "train", "evaluate"]
    phases: list[Event] = [PhaseStarted(name, 10.0 * number) for number, name in enumerate(names)]
    phases.insert(7, PhaseFailed("train", "lost", 68.0))
    first, second = step_seconds(phases, 95.0)
    assert first == {"validate": 10.0, "provision": 10.0, "train": 0.0}
    assert second == {"validate": 20.0, "provision": 10.0, "train": 8.0 + 10.0, "evaluate": 15.0}


def test_a_pause_between_two_launches_is_not_time_of_the_run() -> None:
    begin = [PhaseStarted("provision", 0.0), PhaseStarted("train", 10.0), StepFinished(1, 9, 1, 1.0, {}, 40.0)]
    resumed = [PhaseStarted("provision", 5000.0), PhaseStarted("train", 5020.0), Notice("dropped")]
    assert step_seconds([*begin, *resumed], 5100.0) == [
        {"provision": 10.0, "train": 30.0},
        {"provision": 20.0, "train": 80.0},
    ]


def test_training_without_a_pipeline_has_attempts_too() -> None:
    attempts = [PhaseStarted("train", 0.0), PhaseStarted("load", 30.0), PhaseStarted("train", 1000.0)]
    assert step_seconds(attempts, 1060.0) == [{"train": 90.0}]


def test_other_phases_are_not_timed() -> None:
    assert step_seconds([PhaseStarted("finish_variant", 1.0)], 2.0) == step_seconds([], 2.0) == []
