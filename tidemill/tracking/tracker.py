"""Writes the settings, curves and sample answers of a training run to one MLflow run, which a restart continues.

Without a tracking server everything is in `mlflow.db` and `mlartifacts` below `output`. A server that does not answer
ends a new run on a user's machine at its start. A resumed run, and a run that has its pods, trains without it; the
MLflow run is opened when the server is back.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.text import excerpt
from tidemill.protocols import Evaluation
from tidemill.tracking.metric_writer import RETRY_S, MetricWriter, Point, Spool, Unwritten
from tidemill.tracking.mlflow_runs import (
    DESCRIBED,
    attempt_tags,
    describe,
    open_run,
    save_run_id,
    saved_run_id,
    set_tags,
)
from tidemill.tracking.mlflow_server import make_client, tracking_uri

METRIC_NAME = re.compile(r"^[A-Za-z0-9_\-. :/]{1,250}$")
FINISH_TIMEOUT_S = 30.0
TABLES, MAX_TABLES = "mlflow.loggedArtifacts", 50
STEP, SCORE = "time/step", "evaluation/score"
"""The metrics that every step, and every evaluation, has."""
FAILURE = "tidemill.failure"
"""Tag of a run whose last attempt failed: the reason. The next attempt removes it."""
Status = Literal["FINISHED", "FAILED", "KILLED"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrackedRun:
    """The MLflow run of a training run, which is opened when MLflow first answers.

    Attributes:
        client: of MLflow.
        config: of the training run.
        run_id: None until the MLflow run exists.
        opened: whether it can be written to.
    """

    client: Any
    config: RunConfig
    run_id: str | None
    opened: bool = False

    def open(self) -> str:
        """Open or create the run, and describe it; returns its id. May be called again, also after a failure."""
        if not self.opened:
            run = open_run(self.client, self.config, self.run_id)
            self.run_id = str(run.info.run_id)
            if DESCRIBED not in run.data.tags:
                describe(self.client, self.run_id, self.config)
            if FAILURE in run.data.tags:
                self.client.delete_tag(self.run_id, FAILURE)
            set_tags(self.client, self.run_id, attempt_tags(self.config))
            save_run_id(self.config, self.run_id)
            self.opened = True
        return str(self.run_id)


class Tracker:
    """Writes to the MLflow run of a training. Logging returns at once; a `MetricWriter` sends.

    MLflow can neither replace nor delete a value. A restart repeats the steps after its checkpoint, so values of the
    steps that MLflow has already, or gets from the spool file, are not logged again.

    Attributes:
        newest_step: the newest step that an earlier attempt logged; -1 for none.
        newest_evaluation: the same of the evaluations.
    """

    def __init__(self, run: TrackedRun, spool_folder: Path, retry_s: float = RETRY_S) -> None:
        self.run, self.client = run, run.client
        spool = Spool(spool_folder / f"mlflow-spool-{run.run_id or 'new'}.jsonl")
        waiting = list(spool.read()) if spool.waiting else []
        self.newest_step, self.newest_evaluation = (
            newest_step([point for point in waiting if point.key == key]) for key in (STEP, SCORE)
        )
        self.writer = MetricWriter(self.send, spool, retry_s)

    @classmethod
    def start(cls, config: RunConfig, run_id: str | None = None) -> Tracker:
        """Open the run `run_id`, or the one that MLFLOW_RUN_ID or the run's folder names, or a new one.

        Raises:
            ConfigError: MLflow cannot be reached or refuses, and the run is new and has no pods.
        """
        uri, known = tracking_uri(config), run_id or os.environ.get("MLFLOW_RUN_ID") or saved_run_id(config)
        run = TrackedRun(make_client(uri), config, known)
        from mlflow.exceptions import MlflowException

        sent = [-1, -1]
        try:
            run.open()
            if known is not None:
                sent = [newest_step(run.client.get_metric_history(run.run_id, key)) for key in (STEP, SCORE)]
        except MlflowException as error:
            if known is None and config.cluster.provider != "kuberay":
                raise ConfigError("tracking.uri", uri, "an MLflow that answers", f"{error}") from error
            log.warning("the run cannot be opened in MLflow at %s; trying again during the training: %s", uri, error)
        tracker = cls(run, config.folder)
        tracker.newest_step = max(tracker.newest_step, sent[0])
        tracker.newest_evaluation = max(tracker.newest_evaluation, sent[1])
        tracker.log_text(config.to_yaml(), "config.yaml")
        return tracker

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, which a checkpoint stores for the restart. None until MLflow answers."""
        return self.run.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log values at a step, unless an earlier attempt did.

        Raises:
            ConfigError: MLflow does not accept a name.
        """
        if step > self.newest_step:
            self.add(step, metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.writer.add([Point(check_name(key), float(value), now, step) for key, value in metrics.items()])

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log a held-out score, and all answers as the table `answers/STEP.json`, unless an earlier attempt did."""
        if step <= self.newest_evaluation:
            return
        skipped = {f"evaluation/skipped/{reason}": float(number) for reason, number in evaluation.skipped.items()}
        self.add(step, {SCORE: evaluation.score, **skipped})
        answers = [asdict(answer) for answer in evaluation.answers]
        if answers:
            columns = {name: [answer[name] for answer in answers] for name in answers[0]}
            self.log_table(f"answers/{step:06d}.json", columns)

    def log_text(self, text: str, name: str) -> None:
        """Store `text` as the artifact `name`, such as `report.md`."""
        self.writer.submit(name, lambda: self.client.log_text(self.run.open(), text, name))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Store a file in a folder of the run's artifacts."""
        self.writer.submit(path.name, lambda: self.client.log_artifact(self.run.open(), str(path), folder))

    def log_table(self, name: str, columns: Mapping[str, Sequence[object]]) -> None:
        """Store a table, such as sample answers, which MLflow shows as a table; `name` ends in `.json`."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        table = {"columns": list(columns), "data": rows}
        self.writer.submit(name, lambda: self.store_table(name, table))

    def store_table(self, name: str, table: Mapping[str, object]) -> None:
        """Upload a table, and add it to MLflow's list of tables.

        `MlflowClient.log_table` does the same with pandas, whose import takes seconds.
        """
        run_id = self.run.open()
        self.client.log_dict(run_id, table, name)
        known = json.loads(self.client.get_run(run_id).data.tags.get(TABLES, "[]"))
        if {"path": name, "type": "table"} not in known:
            listed = [*known, {"path": name, "type": "table"}][-MAX_TABLES:]
            self.client.set_tag(run_id, TABLES, json.dumps(listed))

    def fail(self, error: BaseException) -> Unwritten:
        """End the run as failed, with the reason as a tag, or as killed after an interrupt; see `finish`."""
        if not isinstance(error, Exception):
            return self.finish("KILLED")
        why = excerpt(f"{type(error).__name__}: {error}")
        self.writer.submit("failure", lambda: set_tags(self.client, self.run.open(), {FAILURE: why}))
        return self.finish("FAILED")

    def finish(self, status: Status, timeout_s: float = FINISH_TIMEOUT_S) -> Unwritten:
        """Write everything that waits and end the run; returns what did not reach MLflow in time."""
        self.writer.submit("status", lambda: self.client.set_terminated(self.run.open(), status))
        unwritten = self.writer.close(timeout_s)
        if unwritten:
            log.warning(
                "MLflow run %s is incomplete: %d points are in %s for a resume, %d are lost, %d artifacts are missing",
                *(self.run_id, unwritten.spooled, self.writer.spool.path, unwritten.dropped, unwritten.artifacts),
            )
        return unwritten

    def send(self, points: Sequence[Point]) -> None:
        """Send one batch to MLflow."""
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.milliseconds, point.step) for point in points]
        self.client.log_batch(self.run.open(), metrics=metrics)


def check_name(name: str) -> str:
    """The name of a metric, if MLflow accepts it."""
    if not METRIC_NAME.match(name) or name.startswith("/") or posixpath.normpath(name) != name:
        allowed = "up to 250 letters, digits and _ - . space : / as in a relative path"
        raise ConfigError("metric name", name, allowed, "Rename the metric.")
    return name


def newest_step(points: Sequence[Any]) -> int:
    """The largest step of some values of a metric; -1 for none."""
    return max((point.step for point in points), default=-1)
