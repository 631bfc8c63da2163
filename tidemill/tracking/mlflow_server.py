"""The MLflow server of a run, or the SQLite file in its place: address, client, experiment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.retry import OUTAGE_S, wait_for

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults of MLflow's own settings. Without them a dead server blocks a call for minutes."""
SERVERS = ("http://", "https://", "databricks")
"""Beginnings of the address of a server; any other address is a file."""
POLL_S = 5.0
KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag by which MLflow's pages choose what they show of an experiment. Without it they take one with traces for GenAI,
and show no runs."""
REFUSALS = frozenset({401, 403, 404})
"""Answers of a server that does not know the account, or of a server other than MLflow."""

log = logging.getLogger(__name__)


def tracking_uri(config: RunConfig) -> str:
    """`tracking.uri`, or the SQLite file below `output`."""
    return config.tracking.uri or f"sqlite:///{config.output.resolve() / 'mlflow.db'}"


def make_client(uri: str) -> Any:
    """An MLflow client that gives up after seconds.

    Raises:
        ConfigError: `uri` is no tracking URI, or its database cannot be opened.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise ConfigError("tracking.uri", uri, "an MLflow tracking URI that works from here", f"{error}") from error


def await_server(
    config: RunConfig, report: Callable[[str], None], limit_s: float = OUTAGE_S, every_s: float = POLL_S
) -> None:
    """Wait until the server answers, for a step that needs it.

    Args:
        config: names the server; a file is always available.
        report: receives one message if the server does not answer at once.
        limit_s: the longest wait, in seconds.
        every_s: between two requests, in seconds.

    Raises:
        StoreError: the server does not answer in time.
        ConfigError: `tracking.uri` does not work.
    """
    uri = tracking_uri(config)
    if not uri.startswith(SERVERS):
        return
    client = make_client(uri)
    if (problem := outage(client)) is None:
        return
    report(f"MLflow at {uri} does not answer; waiting for at most {limit_s:.0f} s: {problem}")
    if not wait_for(lambda: outage(client) is None, limit_s, every_s):
        raise StoreError(f"MLflow at {uri} does not answer within {limit_s:.0f} s: {problem}")


def access_problem(uri: str) -> str | None:
    """The answer of a server that does not know the account, or of a server other than MLflow; else None.

    A server that does not answer is no problem of access; see `await_server`.
    """
    error = server_error(make_client(uri))
    return str(error) if error is not None and error.get_http_status_code() in REFUSALS else None


def outage(client: Any) -> str | None:
    """The error of a server that cannot answer requests; None if it answers, even if it refuses them."""
    error = server_error(client)
    return str(error) if error is not None and error.get_http_status_code() >= 500 else None


def server_error(client: Any) -> Any:
    """The `MlflowException` of a small request; None if the server answers it."""
    from mlflow.exceptions import MlflowException

    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        return error
    return None


def open_experiment(client: Any, config: RunConfig) -> str:
    """Id of the experiment, which is created if it does not exist, and is one of model training for MLflow's pages."""
    from mlflow.exceptions import MlflowException

    name = config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is None:
        # A server chooses the location. Without a server the default is a folder of the working directory.
        server = tracking_uri(config).startswith(SERVERS)
        location = None if server else (config.output.resolve() / "mlartifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location, tags={KIND: MODEL_TRAINING}))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another run created it
    if found.lifecycle_stage != "active":
        fix = "Restore it with `mlflow experiments restore`, or name another."
        raise ConfigError("tracking.experiment", name, "an experiment that is not deleted", fix)
    if KIND not in found.tags:  # else a user may have chosen another kind
        client.set_experiment_tag(found.experiment_id, KIND, MODEL_TRAINING)
    return str(found.experiment_id)


def runs_page(client: Any) -> str:
    """Path of the page with the runs of the experiment of the newest run; without a run, of the first page."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    newest = client.search_runs(experiments, max_results=1, order_by=["attributes.start_time DESC"])
    if not newest:
        return "/"
    # Without the type the pages of a browser that opens MLflow for the first time are those of GenAI.
    return f"/#/experiments/{newest[0].info.experiment_id}/runs?workflowType=machine_learning"


def experiment_of(config: RunConfig) -> str | None:
    """Id of the experiment, for links to MLflow; None without a server, and from one that does not answer."""
    from mlflow.exceptions import MlflowException

    uri = tracking_uri(config)
    if not uri.startswith("http"):
        return None
    try:
        return open_experiment(make_client(uri), config)
    except MlflowException as error:
        log.warning("no link to the run: MLflow at %s: %s", uri, error)
        return None
