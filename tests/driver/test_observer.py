"""Reports of a run reach MLflow, the event log, the summary and listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_rig import run_config

from tidemill.driver.observer import RunObserver
from tidemill.observe.events import EventLog, StepFinished, read_events
from tidemill.observe.meters import Timings
from tidemill.observe.timeline import newest_attempt
from tidemill.records import EngineId
from tidemill.train.trainer import Position

STEPS = [
    {"time/step": 2.0, "groups/count": 16.0, "reward/mean": 0.25},
    {"time/step": 4.0, "groups/count": 48.0, "reward/mean": 0.5},
]


@dataclass
class Curves:
    """In the place of MLflow."""

    points: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.points.append((step, metrics))

    def log_text(self, text: str, name: str) -> None:
        self.texts[name] = text


def observe(log: EventLog, first_step: int) -> tuple[RunObserver, Curves]:
    """An attempt of two steps."""
    curves: Any = Curves()
    observer = RunObserver(run_config(), log, curves)
    for step, metrics in enumerate(STEPS, first_step):
        timings = Timings()
        with timings.phase("update_actor"):
            pass
        observer.step_finished(Position(step, version=step), metrics)
        observer.active(step, timings, {EngineId(0): [(0.0, 1)]})
    return observer, curves


def test_a_step_reaches_the_log_the_tracker_and_all_listeners(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        heard: list[Mapping[str, float]] = []
        observer, curves = observe(log, 1)
        observer.listeners.append(heard.append)
        observer.step_finished(Position(3, version=2), STEPS[0])
    assert curves.points == [(1, STEPS[0]), (2, STEPS[1]), (3, STEPS[0])]
    assert heard == [STEPS[0]]
    steps = [event for event in read_events(tmp_path / "events.jsonl") if isinstance(event, StepFinished)]
    assert [(e.step, e.steps, e.version, e.seconds) for e in steps] == [(1, 5, 1, 2.0), (2, 5, 2, 4.0), (3, 5, 2, 2.0)]
    assert [event.metrics for event in steps] == [STEPS[0], STEPS[1], STEPS[0]]
    assert observer.steps.result() == {"time/step": 8.0, "groups/count": 80.0, "reward/mean": 0.4}


def test_the_timeline_of_a_resumed_run_is_that_of_its_newest_attempt(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        observe(log, 1)
        observer, curves = observe(log, 3)
        observer.picture()
    assert [activity.step for activity in newest_attempt(read_events(tmp_path / "events.jsonl"))] == [3, 4]
    assert "Steps 3 to 4" in curves.texts["timeline.svg"]
