"""The observer of a run: reports progress to the event log and to MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from tidemill.config.run import RunConfig
from tidemill.observe.charts import timeline_svg
from tidemill.observe.events import (
    Activity,
    EvaluationFinished,
    EventLog,
    Notice,
    PhaseStarted,
    StepFinished,
    past_events,
)
from tidemill.observe.meters import Timings
from tidemill.observe.metrics import MetricsAggregator
from tidemill.observe.timeline import newest_attempt
from tidemill.protocols import Evaluation, Loads
from tidemill.tracking.tracker import Tracker
from tidemill.train.trainer import Metrics, Position


@dataclass(slots=True)
class RunObserver:
    """Writes events and metrics, and aggregates the metrics of the steps for the summary.

    Attributes:
        steps: metrics of all steps of this attempt.
        listeners: called with the metrics of every step.
        began: begin of this attempt, in seconds since the epoch.
    """

    config: RunConfig
    log: EventLog
    tracker: Tracker
    steps: MetricsAggregator = field(default_factory=MetricsAggregator)
    listeners: list[Callable[[Metrics], None]] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    _left_out: str = ""

    def step_finished(self, position: Position, metrics: Metrics) -> None:
        self.steps.add(metrics)
        for listener in self.listeners:
            listener(metrics)
        self.tracker.log(position.step, metrics)
        self.log.write(
            StepFinished(
                position.step, self.config.trainer.steps, position.version, metrics["time/step"], metrics, time.time()
            )
        )

    def synced(self, step: int, metrics: Metrics) -> None:
        self.tracker.log(step, metrics)

    def active(self, step: int, timings: Timings, loads: Loads) -> None:
        by_name = {str(engine): load for engine, load in loads.items()}
        self.log.write(Activity(step, timings.dated(time.time()), by_name, self.began))

    def picture(self) -> None:
        """Store the timeline of this attempt, if it has finished a step."""
        if activities := newest_attempt(past_events(self.log.path)):
            self.tracker.log_text(timeline_svg(activities), "timeline.svg")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.tracker.log_evaluation(step, evaluation)
        answers = [asdict(answer) for answer in evaluation.answers]
        self.log.write(EvaluationFinished(step, evaluation.score, answers))
        if evaluation.left_out not in ("", self._left_out):
            self.notice(evaluation.left_out)
        self._left_out = evaluation.left_out

    def phase(self, name: str) -> None:
        """A phase of the run begins."""
        self.log.write(PhaseStarted(name, time.time()))

    def notice(self, text: str) -> None:
        self.log.write(Notice(text))
