"""The MLflow server of a run, or the SQLite file in its place: where it is, a client of it, and an experiment on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidemill.config import RunConfig
from tidemill.errors import ConfigError

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""MLflow's own settings, where the user has not chosen: by default a dead server blocks a call for minutes."""


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


def open_experiment(client: Any, config: RunConfig) -> str:
    """Id of the experiment, which is made if it does not exist."""
    from mlflow.exceptions import MlflowException

    name = config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is None:
        # A server chooses its own place; without one MLflow would take a folder of the working directory.
        server = tracking_uri(config).startswith(("http://", "https://", "databricks"))
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
