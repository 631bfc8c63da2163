"""The steps `provision`, `train` and `evaluate`. They take and return text, because that is what KFP passes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.observe.events import EvaluationFinished, Notice
from tidemill.observe.report import Summary, shortened
from tidemill.protocols import Answer, Evaluation
from tidemill.steps.provider import provider_of
from tidemill.steps.refusal import explained
from tidemill.steps.run_folder import step
from tidemill.tracking.mlflow_runs import metric_history
from tidemill.tracking.tracker import Tracker

LogMetric = Callable[[str, float], None]


@explained()
def provision(config: str) -> str:
    """Start what the run needs: store and model on this machine, or a Ray cluster on Kubernetes. May be retried.

    Returns:
        JSON. On this machine: `store`, the endpoint; `model`, the local folder; `source`, where the model was found.
        On Kubernetes: `attempt`; `job`, the RayJob; `namespace`.
    """
    run = parse_config(config)
    with step("provision", run) as log:
        provisioned = provider_of(run).provision(log)
    return json.dumps(provisioned)


@explained()
def train(config: str, provisioned: str, log_metric: LogMetric) -> str:
    """Train to the end, from the newest checkpoint if one exists.

    Args:
        config: settings as YAML.
        provisioned: result of `provision`.
        log_metric: gets the numbers of the summary.

    Returns:
        JSON of `observe.report.Summary` with shortened texts.
    """
    run = parse_config(config)
    with step("train", run) as log:
        summary = provider_of(run).train(json.loads(provisioned), log)
        summary.write(run.folder / "summary.json")
    for name, value in asdict(summary).items():
        log_number(log_metric, name, value)
    return summary.to_json()


@explained()
def evaluate(config: str, summary: str, log_metric: LogMetric) -> str:
    """Score the exported model on the held-out prompts with a fresh engine.

    Returns:
        JSON of `protocols.Evaluation` with the answers of the report, shortened; `null` without `data.held_out`. MLflow
        holds all answers.
    """
    run = parse_config(config)
    trained = Summary.from_json(summary)
    with step("evaluate", run) as log:
        evaluation = None if run.data.held_out is None else provider_of(run).score(trained)
        if evaluation is None:
            return "null"
        answers = [asdict(answer) for answer in evaluation.answers]
        log.write(EvaluationFinished(trained.steps, evaluation.score, answers))
        if evaluation.left_out:
            log.write(Notice(evaluation.left_out))
        track_evaluation(run, trained, evaluation)
    log_number(log_metric, "held_out_score", evaluation.score)
    return json.dumps(asdict(excerpt(evaluation, trained)), ensure_ascii=False)


def log_number(log_metric: LogMetric, name: str, value: object) -> None:
    """Log a finite number as a metric of KFP, whose JSON has no NaN and no infinity; ignore every other value."""
    if isinstance(value, int | float) and math.isfinite(value):
        log_metric(name, value)


def excerpt(evaluation: Evaluation, summary: Summary) -> Evaluation:
    """The evaluation with the answers of the report only.

    KFP passes all inputs of a step as one command-line argument, which Linux limits to 128 KiB, and stores them in
    etcd.
    """
    asked = {sample.prompt for sample in summary.samples}
    shown: dict[str, Answer] = {}
    for answer in map(shortened, evaluation.answers):
        if answer.prompt in asked:
            shown.setdefault(answer.prompt, answer)  # of prompts with equal shortened text, the first
    return replace(evaluation, answers=tuple(shown.values()))


def track_evaluation(run: RunConfig, summary: Summary, evaluation: Evaluation) -> None:
    """Log the score and all answers of the exported model to the MLflow run of the training, unless it has them."""
    run_id = summary.mlflow_run_id
    if run_id is not None and summary.steps not in dict(metric_history(run, run_id, "evaluation/score")):
        tracker = Tracker.start(run, run_id)
        tracker.log_evaluation(summary.steps, evaluation)
        tracker.finish("FINISHED")
