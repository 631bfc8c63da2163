"""The MLflow runs of trainings and of sweeps: opened, described with settings, prompts and origin, ended.

MLflow shows the variants of a sweep below the run of their sweep.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import tidemill
from tidemill.config.names import job_name
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.markdown import links_table
from tidemill.tracking.mlflow_server import make_client, open_experiment, tracking_uri

RUN_ID_FILE = "mlflow.json"
PARAM_LENGTH, PARAMS_PER_CALL = 6000, 100
DESCRIBED = "tidemill.version"
"""Tag of a run whose settings are logged; a run that MLFLOW_RUN_ID names does not have it yet."""
NOTE, SOURCE, COMMIT = "mlflow.note.content", "mlflow.source.name", "mlflow.source.git.commit"
"""Tags that MLflow shows as the description of a run, in Markdown, and as its source."""
ATTEMPT, KFP_RUN, REVISION = "TIDEMILL_ATTEMPT", "TIDEMILL_KFP_RUN", "TIDEMILL_GIT_REVISION"
"""Variables: the number of the attempt and the id of the KFP run, which the RayJob sets; the commit of the image."""
VARIANT = re.compile(r"^(?P<sweep>.+)-v\d+$")
"""Name of a variant. It contains the name of the sweep, by which every process finds the run of the sweep."""
SWEEP, PARENT = "tidemill.sweep", "mlflow.parentRunId"
DATASET_USE = "mlflow.data.context"
UPLOADED = re.compile(r"^s3://.*/inputs/(?P<digest>[0-9a-f]{64})/")
DIGEST_LENGTH = 8
"""As many characters as MLflow's own digests have, and as its lists show."""

log = logging.getLogger(__name__)


def open_run(client: Any, config: RunConfig, run_id: str | None) -> Any:
    """The run to write to, RUNNING: `run_id`, or a new one if it is None or was deleted."""
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
        log.warning("the MLflow run %s of this training run was deleted; continuing in a new one", run_id)
    experiment = open_experiment(client, config)
    return client.create_run(experiment, run_name=config.name, tags=parent_tag(client, experiment, config.name))


def save_run_id(config: RunConfig, run_id: str) -> None:
    """Store the MLflow run in the folder of a run, for an attempt that finds no checkpoint.

    The settings are stored too, because MLflow does not change those of a run.
    """
    path = config.folder / RUN_ID_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{RUN_ID_FILE}.partial")
    partial.write_text(json.dumps({"run_id": run_id, "settings": config.to_yaml()}), encoding="utf-8")
    partial.replace(path)


def saved_run_id(config: RunConfig) -> str | None:
    """The MLflow run of an earlier attempt with the same settings, if the folder of the run names one."""
    path: Path = config.folder / RUN_ID_FILE
    if not path.is_file():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    return str(saved["run_id"]) if saved["settings"] == config.to_yaml() else None


def end_killed_run(config: RunConfig) -> None:
    """End the MLflow run of a training run whose processes were killed and could not end it themselves.

    If the server is away, the MLflow run remains as it is and the log reports it.
    """
    if (run_id := saved_run_id(config)) is None:
        return
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "KILLED")
    except MlflowException as error:
        log.warning("the MLflow run at %s cannot be ended: %s", tracking_uri(config), error)


def metric_history(config: RunConfig, run_id: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, by step; a step that a restart repeated counts with its last value.

    If the server is away, the result is empty and the log reports it: the run does not fail for a curve.
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


def describe(client: Any, run_id: str, config: RunConfig) -> None:
    """Log the settings as parameters, the prompts as datasets, and the origin of a run as tags."""
    from mlflow.entities import Param

    params = [Param(key, value) for key, value in flatten(config.model_dump(mode="json"))]
    for start in range(0, len(params), PARAMS_PER_CALL):
        client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
    client.log_inputs(run_id, datasets=dataset_inputs(config))
    tags = {
        "tidemill.model": config.model,
        NOTE: links_table(config),
        SOURCE: "tidemill",
        DESCRIBED: tidemill.__version__,
    }
    set_tags(client, run_id, tags)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as (dotted key, text); a text that MLflow would cut is only in the artifact `config.yaml`."""
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


def dataset_inputs(config: RunConfig) -> list[Any]:
    """The training and held-out prompts, as `mlflow.entities.DatasetInput`."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for source, use in ((config.data.train, "training"), (config.data.held_out, "evaluation")):
        if source is not None:
            kind = source.partition("://")[0] if "://" in source else "local"
            name = PurePosixPath(source).name if source.endswith((".jsonl", ".parquet")) else source
            dataset = Dataset(name, digest_of(source), kind, json.dumps({"uri": source}))
            found.append(DatasetInput(dataset, [InputTag(DATASET_USE, use)]))
    return found


def digest_of(source: str) -> str:
    """Digest of the rows of a local or uploaded file, or of the name of any other source."""
    if uploaded := UPLOADED.search(source):
        return uploaded["digest"][:DIGEST_LENGTH]
    if Path(source).is_file():
        with Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LENGTH]
    return hashlib.sha256(source.encode()).hexdigest()[:DIGEST_LENGTH]


def attempt_tags(config: RunConfig) -> dict[str, str | None]:
    """Origin of the current attempt: the code, and on Kubernetes the cluster, its image and the KFP run."""
    revision = git_revision()
    tags = {"tidemill.git_revision": revision, COMMIT: revision, "kfp.run_id": os.environ.get(KFP_RUN)}
    attempt = os.environ.get(ATTEMPT)
    if config.cluster.provider == "kuberay" and attempt is not None:
        tags["tidemill.attempt"] = attempt
        tags["tidemill.cluster"] = job_name(config.name, int(attempt))
        tags["tidemill.image"] = config.kubernetes.image
    return tags


def set_tags(client: Any, run_id: str, tags: Mapping[str, str | None]) -> None:
    """Set the tags that have a value."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items() if value is not None])


def git_revision() -> str | None:
    """Commit of the image, or of the working directory (`-dirty` with changes); None without either."""
    if revision := os.environ.get(REVISION):
        return revision
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def open_sweep(config: RunConfig, variants: Sequence[str]) -> None:
    """Create the MLflow run of a sweep, or reopen that of an earlier try.

    Args:
        config: the settings that all variants share, under the name of the sweep.
        variants: their names.

    Raises:
        ConfigError: MLflow cannot be reached or refuses.
    """
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        experiment = open_experiment(client, config)
        run = find_sweep(client, experiment, config.name)
        if run is None:
            run = client.create_run(experiment, run_name=config.name, tags={SWEEP: config.name})
        client.update_run(run.info.run_id, status="RUNNING")
        client.set_tag(run.info.run_id, "tidemill.variants", ", ".join(variants))
    except MlflowException as error:
        raise ConfigError("tracking.uri", tracking_uri(config), "an MLflow that answers", f"{error}") from error


def close_sweep(config: RunConfig, scores: Mapping[str, float], best: str, report: str) -> None:
    """Log the scores of the variants and their table to the MLflow run of their sweep, and end it.

    If the server is away, the sweep does not fail; the log reports it.
    """
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        run = find_sweep(client, open_experiment(client, config), config.name)
        if run is None:
            log.warning("the MLflow run of the sweep %s was deleted", config.name)
            return
        for name, score in scores.items():
            client.log_metric(run.info.run_id, f"held_out_score/{name}", score)
        client.set_tag(run.info.run_id, "tidemill.best", best)
        client.log_text(run.info.run_id, report, "report.md")
        client.set_terminated(run.info.run_id)
    except (MlflowException, OSError) as error:  # artifacts raise the OSError of the HTTP client
        log.warning("the sweep %s cannot be logged to MLflow at %s: %s", config.name, tracking_uri(config), error)


def parent_tag(client: Any, experiment: str, name: str) -> dict[str, str]:
    """The tag by which MLflow shows a variant below its sweep; empty for any other run."""
    match = VARIANT.match(name)
    found = None if match is None else find_sweep(client, experiment, match["sweep"])
    return {} if found is None else {PARENT: found.info.run_id}


def find_sweep(client: Any, experiment: str, name: str) -> Any:
    """The MLflow run of a sweep, or None."""
    found = client.search_runs([experiment], f"tags.`{SWEEP}` = '{name}'", max_results=1)
    return found[0] if found else None
