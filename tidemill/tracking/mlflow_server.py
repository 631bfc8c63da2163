"""The MLflow server of a run, or the SQLite file in its place: where it is, a client of it, and an experiment on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.retry import OUTAGE_S

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's own settings, where the user has not chosen: by default a dead server blocks a call for minutes."""

SERVERS = ("http://", "https://", "databricks")
"""How the address of a server begins; anything else is a file."""
POLL_S = 5.0
REFUSALS = frozenset({401, 403, 404})
"""Answers of a server that knows us not, or is none of MLflow."""


def tracking_uri(config: RunConfig) -> str:
    """`tracking.uri`, or the SQLite file below `output`."""
    return config.tracking.uri or f"sqlite:///{config.output.resolve() / 'mlflow.db'}"


def make_client(uri: str) -> Any:
    """An MLflow client that gives up soon.

    Raises:
        ConfigError: `uri` is not one, or its database cannot be opened.
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


def await_answer(config: RunConfig, tell: Callable[[str], None], patience_s: float = OUTAGE_S) -> None:
    """Wait while the server is away, for what a step cannot do without it.

    Args:
        config: names the server; a file is always there.
        tell: is told, once, that there is something to wait for.
        patience_s: how long it may be away, in seconds.

    Raises:
        StoreError: it is away for longer.
        ConfigError: `tracking.uri` does not work.
    """
    uri = tracking_uri(config)
    if not uri.startswith(SERVERS):
        return
    client, deadline, told = make_client(uri), time.monotonic() + patience_s, False
    while (problem := silence(client)) is not None:
        if time.monotonic() > deadline:
            raise StoreError(f"MLflow at {uri} does not answer, for {patience_s:.0f} s now: {problem}")
        if not told:
            tell(f"MLflow at {uri} does not answer; this waits for it, for {patience_s:.0f} s at most: {problem}")
            told = True
        time.sleep(POLL_S)


def refusal(uri: str) -> str | None:
    """What a server says to an account that it does not know, or one that is none of MLflow; None if it lets us ask.

    One that is away is none that refuses: see `silence`.
    """
    client = make_client(uri)
    from mlflow.exceptions import MlflowException

    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        return str(error) if error.get_http_status_code() in REFUSALS else None
    return None


def silence(client: Any) -> str | None:
    """Why a server cannot be asked for anything now; None if it answers, and be it that it refuses us."""
    from mlflow.exceptions import MlflowException

    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        return str(error) if error.get_http_status_code() >= 500 else None
    return None


def open_experiment(client: Any, config: RunConfig) -> str:
    """Id of the experiment, which is made if it does not exist."""
    from mlflow.exceptions import MlflowException

    name = config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is None:
        # A server chooses its own place; without one MLflow would take a folder of the working directory.
        server = tracking_uri(config).startswith(SERVERS)
        location = None if server else (config.output.resolve() / "mlartifacts").as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # another run was faster
    if found.lifecycle_stage != "active":
        fix = "Restore it with `mlflow experiments restore`, or name another."
        raise ConfigError("tracking.experiment", name, "an experiment that is not deleted", fix)
    return str(found.experiment_id)
