"""The step `register`: the model version behind the gate, and the reports."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.observe.events import EventLog, Notice, past_events, step_seconds
from tidemill.observe.markdown import mlflow_page, report
from tidemill.observe.page import Curves, page
from tidemill.observe.report import Summary
from tidemill.protocols import evaluation_from_json
from tidemill.retry import OUTAGE_S
from tidemill.steps.refusal import explained
from tidemill.steps.run_folder import step
from tidemill.tracking import registry
from tidemill.tracking.mlflow_runs import metric_history
from tidemill.tracking.mlflow_server import await_server, experiment_of
from tidemill.tracking.tracker import Tracker


class ModelArtifact(Protocol):
    """KFP's artifact of a model: a small file, and metadata that say where the weights are."""

    path: str
    metadata: dict[str, Any]


@explained()
def register(
    config: str,
    summary: str,
    evaluation: str,
    report_path: str,
    page_path: str,
    model: ModelArtifact,
    *,
    outage_s: float = OUTAGE_S,
) -> str:
    """Make the model a version of the registry if it passes the gate; write the reports and `summary.json`.

    Args:
        config: settings as YAML.
        summary: result of `train`.
        evaluation: result of `evaluate`.
        report_path: file for the report as Markdown.
        page_path: file for the report as HTML.
        model: gets the location of the model.
        outage_s: how long MLflow may be away, in seconds.

    Returns:
        JSON of the summary with the model version, null if the gate refused it.
    """
    run = parse_config(config)
    with step("register", run) as log:
        trained = Summary.from_json(summary).scored(evaluation_from_json(evaluation))
        final = with_step_times(with_version(run, trained, log, outage_s), run)
        if final.model_version is None:
            log.write(Notice(f"no model version: {final.why('model_version')}"))
        else:
            promote_version(run, final, log)
        reports = finish(run, final)
        for path, text in zip((report_path, page_path), reports.values(), strict=True):
            Path(path).write_text(text, encoding="utf-8")
        describe_model(model, run, final)
    return final.to_json()


def with_version(run: RunConfig, summary: Summary, log: EventLog, outage_s: float) -> Summary:
    """The summary with the new model version, or with the reason why there is none.

    Waits for an MLflow server that does not answer, because the training is over and nothing else can register it.
    """
    passed, reason = registry.gate(summary.held_out_before, summary.held_out_after, run.registry.min_score)
    for needed in ("model_uri", "mlflow_run_id"):
        if asdict(summary)[needed] is None:
            passed, reason = False, summary.why(needed)
    if not passed:
        return replace(summary, missing={**summary.missing, "model_version": reason})
    await_server(run, lambda text: log.write(Notice(text)), outage_s)
    tags = {} if summary.checkpoint_uri is None else {"checkpoint_uri": summary.checkpoint_uri}
    uri, run_id = str(summary.model_uri), str(summary.mlflow_run_id)
    version = registry.register(run, uri, run_id, summary.held_out_after, tags)
    return replace(summary, model_version=f"{run.registered_model}/{version}")


def promote_version(run: RunConfig, summary: Summary, log: EventLog) -> None:
    """Make the new version the champion if it passes the gate against the present champion."""
    version = str(summary.model_version).rpartition("/")[2]
    passed, reason = registry.promote(run, version, summary.held_out_before, summary.held_out_after)
    if not passed:
        log.write(Notice(f"{summary.model_version} stays {run.registry.alias}: {reason}"))


def finish(run: RunConfig, summary: Summary) -> dict[str, str]:
    """Write `summary.json` and add the reports to the MLflow run of the training.

    Returns:
        `report.md`, then `report.html`.
    """
    summary.write(run.folder / "summary.json")
    run_id, curves = summary.mlflow_run_id, Curves()
    if run_id is not None:  # every step can reach MLflow, wherever it runs
        curves = Curves(*(metric_history(run, run_id, name) for name in ("reward/mean", "evaluation/score")))
    experiment = None if run_id is None else experiment_of(run)
    place = None if experiment is None else mlflow_page(run, experiment, run_id)
    reports = {"report.md": report(run.name, summary, place), "report.html": page(run.name, summary, curves, place)}
    if run_id is not None:
        tracker = Tracker.start(run, run_id)
        for name, text in reports.items():
            tracker.log_text(text, name)
        tracker.finish("FINISHED")
    return reports


def describe_model(model: ModelArtifact, run: RunConfig, summary: Summary) -> None:
    """Write the location of the model; the weights stay in the store, because KFP copies an artifact's path."""
    known = {"run": run.name, "score": summary.held_out_after, "base_model": run.model}
    names = {"uri": summary.model_uri, "version": summary.model_version, "checkpoint_uri": summary.checkpoint_uri}
    model.metadata.update({key: value for key, value in (names | known).items() if value is not None})
    Path(model.path).write_text(json.dumps(model.metadata, indent=2), encoding="utf-8")


def with_step_times(summary: Summary, run: RunConfig) -> Summary:
    """The summary with the wall time of the pipeline's steps.

    On Kubernetes the events of this pod have this step only, and `train` counted the time of all attempts.
    """
    launches = step_seconds(past_events(run.folder / "events.jsonl"), time.time())
    newest = launches[-1] if launches else {}
    after = sum(newest.get(name, 0.0) for name in ("evaluate", "register"))
    return replace(
        summary,
        total_seconds=max(summary.total_seconds + after, sum(sum(launch.values()) for launch in launches)),
        phase_seconds={name: value for name, value in newest.items() if name != "train"} | dict(summary.phase_seconds),
    )
