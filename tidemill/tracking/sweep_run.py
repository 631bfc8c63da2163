"""The MLflow run of a sweep, below which MLflow shows those of its variants."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.tracking.mlflow_server import make_client, open_experiment, tracking_uri

VARIANT = re.compile(r"^(?P<sweep>.+)-v\d+$")
"""Name of a variant; that of its sweep is in it, so that whoever opens its run, wherever that is, finds the sweep's."""
SWEEP, PARENT = "tidemill.sweep", "mlflow.parentRunId"

log = logging.getLogger(__name__)


def open_sweep(config: RunConfig, variants: Sequence[str]) -> None:
    """Make the MLflow run of a sweep; one of an earlier try is taken again.

    Args:
        config: what all variants have in common, under the name of the sweep.
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
    """Add the scores of the variants and the table of them to the MLflow run of their sweep, and end it.

    A server that is away costs that and not the sweep; the log says so.
    """
    client = make_client(tracking_uri(config))
    from mlflow.exceptions import MlflowException

    try:
        run = find_sweep(client, open_experiment(client, config), config.name)
        if run is None:
            log.warning("the MLflow run of the sweep %s does not exist any more", config.name)
            return
        for name, score in scores.items():
            client.log_metric(run.info.run_id, f"held_out_score/{name}", score)
        client.set_tag(run.info.run_id, "tidemill.best", best)
        client.log_text(run.info.run_id, report, "report.md")
        client.set_terminated(run.info.run_id)
    except (MlflowException, OSError) as error:  # what its HTTP client raises of artifacts is an OSError
        log.warning("the sweep %s is not told in MLflow at %s: %s", config.name, tracking_uri(config), error)


def kinship(client: Any, experiment: str, name: str) -> dict[str, str]:
    """The tag by which MLflow shows a variant below its sweep; none for a run that is no variant."""
    match = VARIANT.match(name)
    found = None if match is None else find_sweep(client, experiment, match["sweep"])
    return {} if found is None else {PARENT: found.info.run_id}


def find_sweep(client: Any, experiment: str, name: str) -> Any:
    """The MLflow run of a sweep, or None."""
    found = client.search_runs([experiment], f"tags.`{SWEEP}` = '{name}'", max_results=1)
    return found[0] if found else None
