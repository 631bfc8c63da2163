"""What remains after a run: checkpoints, metrics, registered models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidemill.config.section import ALIAS, BUCKET, REGISTERED, Count, Number, Positive, Section, Text


class StoreConfig(Section):
    """S3 object store. Keys come from TIDEMILL_S3_ACCESS_KEY and TIDEMILL_S3_SECRET_KEY, never from here."""

    endpoint: str = "embedded"
    """`embedded` starts a server for the run below `output`; else the `http(s)://host:port` of any S3 server. Machines
    may share it: a new run cannot take the name of another, and of two trainings under one name the newer one
    continues."""
    bucket: Annotated[str, Field(min_length=3, max_length=63, pattern=BUCKET)] = "tidemill"
    """Bucket for checkpoints and models; created if it does not exist."""


class CheckpointConfig(Section):
    """Atomic commits of everything a restart needs."""

    every: Count = 10
    """Policy versions between two checkpoints; 0 commits only the one at the end."""
    keep: Positive = 2
    """Newest committed checkpoints of this run that remain; older ones are deleted."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` continues from the newest commit of a run with this name; `never` refuses to start if one exists."""


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = None
    """The `http(s)://host:port` of a tracking server, `databricks`, or a database as MLflow names it, such as
    `sqlite:///FILE`; null writes to an SQLite file below `output`. A password is refused: MLflow reads it from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: Text = "tidemill"
    """Experiment that the runs belong to."""


class RegistryConfig(Section):
    """The gate before a model version is registered."""

    model: Annotated[str, Field(pattern=REGISTERED)] | None = None
    """Name of the registered model; null uses the run's `name`."""
    min_score: Number | None = None
    """Held-out score that the policy must reach; null only requires that it did not get worse."""
    alias: Annotated[str, Field(pattern=ALIAS)] = "candidate"
    """Alias of the new version, which also becomes the `champion` if it scores at least as much as the current one."""
