"""One MLflow run per training run: settings, curves, sample answers. A restart goes on in the same run.

Without a tracking server everything stands in `mlflow.db` and `mlartifacts` below `output`. A server that does not
answer at the start ends a run that only begins, on the machine of who began it. A run that goes on, or has its pods
already, trains without it, and the MLflow run is opened when the server is back.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tidemill
from tidemill.config.names import job_name
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.markdown import links_table
from tidemill.observe.text import excerpt
from tidemill.protocols import Evaluation
from tidemill.tracking.dataset_inputs import dataset_inputs
from tidemill.tracking.metric_writer import MetricWriter, Point, Spool, Unwritten
from tidemill.tracking.mlflow_server import make_client, open_experiment, tracking_uri
from tidemill.tracking.run_note import note_run, noted_run
from tidemill.tracking.sweep_run import kinship

METRIC_NAME = re.compile(r"^[A-Za-z0-9_\-. :/]{1,250}$")
PARAM_LENGTH, PARAMS_PER_CALL = 6000, 100
FINISH_TIMEOUT_S = 30.0
TABLES, MAX_TABLES = "mlflow.loggedArtifacts", 50
OWNED = "tidemill.version"
"""Tag of a run whose settings are logged; a run made by MLFLOW_RUN_ID's owner does not have it yet."""
FAILURE = "tidemill.failure"
"""Tag of a run whose last attempt failed: why; gone once another one goes on."""
NOTE, SOURCE, COMMIT = "mlflow.note.content", "mlflow.source.name", "mlflow.source.git.commit"
"""Tags that MLflow shows as the description of a run, in Markdown, and as its source."""
ATTEMPT, KFP_RUN, REVISION = "TIDEMILL_ATTEMPT", "TIDEMILL_KFP_RUN", "TIDEMILL_GIT_REVISION"
"""Variables: the number of the attempt and the id of the KFP run, which the RayJob sets; the commit of the image."""
Status = Literal["FINISHED", "FAILED", "KILLED"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrackedRun:
    """The MLflow run of a training run, which is opened when MLflow first answers.

    Attributes:
        client: of MLflow.
        config: of the training run.
        run_id: None while there is none yet.
        opened: whether it can be written to.
    """

    client: Any
    config: RunConfig
    run_id: str | None
    opened: bool = False

    def open(self) -> str:
        """Open or make the run, and describe it; returns its id. May be called again, also after it failed."""
        if not self.opened:
            run = open_run(self.client, self.config, self.run_id)
            self.run_id = str(run.info.run_id)
            if OWNED not in run.data.tags:
                describe(self.client, self.run_id, self.config)
            if FAILURE in run.data.tags:
                self.client.delete_tag(self.run_id, FAILURE)
            set_tags(self.client, self.run_id, attempt_tags(self.config))
            note_run(self.config, self.run_id)
            self.opened = True
        return str(self.run_id)


class Tracker:
    """Writes to the MLflow run of a training. Logging returns at once; see `metric_writer` for what happens then."""

    def __init__(self, run: TrackedRun, spool_folder: Path) -> None:
        self.run, self.client = run, run.client
        self.writer = MetricWriter(self.send, Spool(spool_folder / f"mlflow-spool-{run.run_id or 'new'}.jsonl"))

    @classmethod
    def start(cls, config: RunConfig, run_id: str | None = None) -> Tracker:
        """Open the run `run_id`, else the one that MLFLOW_RUN_ID or the run's folder names, else a new one.

        Raises:
            ConfigError: MLflow cannot be reached or refuses, and the run only begins, outside of pods.
        """
        uri, known = tracking_uri(config), run_id or os.environ.get("MLFLOW_RUN_ID") or noted_run(config)
        run = TrackedRun(make_client(uri), config, known)
        from mlflow.exceptions import MlflowException

        try:
            run.open()
        except MlflowException as error:
            if known is None and config.cluster.provider != "kuberay":
                raise ConfigError("tracking.uri", uri, "an MLflow that answers", f"{error}") from error
            log.warning("MLflow at %s does not take the run; trying again while it goes on: %s", uri, error)
        tracker = cls(run, config.folder)
        tracker.log_text(config.to_yaml(), "config.yaml")
        return tracker

    @property
    def run_id(self) -> str | None:
        """Of the MLflow run; a checkpoint keeps it for the restart. None while MLflow has not answered yet."""
        return self.run.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record values at a step.

        Raises:
            ConfigError: MLflow would refuse a name.
        """
        now = int(time.time() * 1000)
        self.writer.add([Point(check_name(key), float(value), now, step) for key, value in metrics.items()])

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Record a held-out score, and every answer as the table `answers/STEP.json`."""
        skipped = {f"evaluation/skipped/{reason}": float(number) for reason, number in evaluation.skipped.items()}
        self.log(step, {"evaluation/score": evaluation.score, **skipped})
        answers = [asdict(answer) for answer in evaluation.answers]
        if answers:
            columns = {name: [answer[name] for answer in answers] for name in answers[0]}
            self.log_table(f"answers/{step:06d}.json", columns)

    def log_text(self, text: str, name: str) -> None:
        """Store `text` as the artifact `name`, such as `report.md`."""
        self.writer.submit(name, lambda: self.client.log_text(self.run.open(), text, name))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Store a file, in a folder of the run's artifacts."""
        self.writer.submit(path.name, lambda: self.client.log_artifact(self.run.open(), str(path), folder))

    def log_table(self, name: str, columns: Mapping[str, Sequence[object]]) -> None:
        """Store a table, such as sample answers, as `name` ending in `.json`, which MLflow shows as a table."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        table = {"columns": list(columns), "data": rows}
        self.writer.submit(name, lambda: self.store_table(name, table))

    def store_table(self, name: str, table: Mapping[str, object]) -> None:
        """Upload a table, and list it where MLflow looks for tables.

        `MlflowClient.log_table` does the same through pandas, which takes seconds to import.
        """
        run_id = self.run.open()
        self.client.log_dict(run_id, table, name)
        known = json.loads(self.client.get_run(run_id).data.tags.get(TABLES, "[]"))
        if {"path": name, "type": "table"} not in known:
            listed = [*known, {"path": name, "type": "table"}][-MAX_TABLES:]
            self.client.set_tag(run_id, TABLES, json.dumps(listed))

    def fail(self, error: BaseException) -> Unwritten:
        """End the run as failed, and say why in its tags, or as killed where somebody ended it; see `finish`."""
        if not isinstance(error, Exception):
            return self.finish("KILLED")
        why = excerpt(f"{type(error).__name__}: {error}")
        self.writer.submit("failure", lambda: set_tags(self.client, self.run.open(), {FAILURE: why}))
        return self.finish("FAILED")

    def finish(self, status: Status, timeout_s: float = FINISH_TIMEOUT_S) -> Unwritten:
        """Write what waits and end the run; says what did not reach MLflow in time."""
        self.writer.submit("status", lambda: self.client.set_terminated(self.run.open(), status))
        unwritten = self.writer.close(timeout_s)
        if unwritten:
            log.warning(
                "MLflow run %s is incomplete: %d points wait in %s for a resume, %d are lost, %d artifacts are missing",
                *(self.run_id, unwritten.spooled, self.writer.spool.path, unwritten.dropped, unwritten.artifacts),
            )
        return unwritten

    def send(self, points: Sequence[Point]) -> None:
        """One batch to MLflow."""
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.milliseconds, point.step) for point in points]
        self.client.log_batch(self.run.open(), metrics=metrics)


def end_killed(config: RunConfig) -> None:
    """End the MLflow run of a training run whose processes were ended from outside, and could not do so themselves.

    A server that is away leaves it as it was; the log says so.
    """
    if (run_id := noted_run(config)) is None:
        return
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "KILLED")
    except MlflowException as error:
        log.warning("MLflow at %s is not told that the run was ended: %s", tracking_uri(config), error)


def history(config: RunConfig, run_id: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, by step; one that was recorded again, by a restart, counts as it was last.

    A server that is away costs the curve and not the run: then there are none, and the log says why.
    """
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        points = client.get_metric_history(run_id, name)
    except MlflowException as error:
        log.warning("no curve of %s: MLflow at %s: %s", name, tracking_uri(config), error)
        return []
    newest = {point.step: point.value for point in sorted(points, key=lambda point: point.timestamp)}
    return sorted(newest.items())


def open_run(client: Any, config: RunConfig, run_id: str | None) -> Any:
    """The run to write to, RUNNING; a new one if `run_id` is not given or its run was deleted meanwhile."""
    from mlflow.exceptions import MlflowException

    if run_id is not None:
        try:
            run = client.get_run(run_id)
            if run.info.lifecycle_stage == "active":
                client.update_run(run_id, status="RUNNING")
                return run
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        log.warning("the MLflow run %s of this training run does not exist any more; going on in a new one", run_id)
    experiment = open_experiment(client, config)
    return client.create_run(experiment, run_name=config.name, tags=kinship(client, experiment, config.name))


def describe(client: Any, run_id: str, config: RunConfig) -> None:
    """Log the settings as parameters, the prompts as datasets, and where the run comes from as tags, once."""
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in flatten(config.model_dump(mode="json"))]
    for start in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
    client.log_inputs(run_id, datasets=dataset_inputs(config))
    tags = {"tidemill.model": config.model, NOTE: links_table(config), SOURCE: "tidemill", OWNED: tidemill.__version__}
    set_tags(client, run_id, tags)


def attempt_tags(config: RunConfig) -> dict[str, str | None]:
    """What made the present attempt: the code, and on Kubernetes the cluster, its image and the KFP run."""
    revision = git_revision()
    tags = {"tidemill.git_revision": revision, COMMIT: revision, "kfp.run_id": os.environ.get(KFP_RUN)}
    attempt = os.environ.get(ATTEMPT)
    if config.cluster.provider == "kuberay" and attempt is not None:
        tags["tidemill.attempt"] = attempt
        tags["tidemill.cluster"] = job_name(config.name, int(attempt))
        tags["tidemill.image"] = config.kubernetes.image
    return tags


def set_tags(client: Any, run_id: str, tags: Mapping[str, str | None]) -> None:
    """Set those that have a value."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items() if value is not None])


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as (dotted key, text); what MLflow would cut is left to the artifact `config.yaml`."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and key != "options":
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, item in enumerate(value):
                yield from flatten(item, f"{name}.{index}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield name, text if len(text) <= PARAM_LENGTH else "too long: see config.yaml"


def git_revision() -> str | None:
    """Commit that an image was made of, else of the working directory, `-dirty` with changes; None without either."""
    if revision := os.environ.get(REVISION):
        return revision
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def check_name(name: str) -> str:
    """A metric name that MLflow takes."""
    if not METRIC_NAME.match(name) or name.startswith("/") or posixpath.normpath(name) != name:
        allowed = "up to 250 letters, digits and _ - . space : / as in a relative path"
        raise ConfigError("metric name", name, allowed, "Rename the metric.")
    return name
