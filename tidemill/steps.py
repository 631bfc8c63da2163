"""What every step of the pipeline does. Text goes in and comes out, because that is what a pipeline passes on.

validate ─► provision ─► train ─► evaluate ─► register, and teardown whatever happens
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from tidemill.cluster.local import LocalCluster
from tidemill.config import RunConfig
from tidemill.errors import ConfigError
from tidemill.failure import recorded
from tidemill.observe.events import EvaluationFinished, EventLog, Notice, PhaseFailed, PhaseStarted, read_events
from tidemill.observe.report import Summary, render
from tidemill.preflight import (
    check_cluster,
    check_inputs,
    check_model,
    check_restart,
    check_room,
    check_store,
    check_tracking,
    count_weights,
)
from tidemill.protocols import Answer, Evaluation
from tidemill.run_file import parse_config
from tidemill.store.locate import Locator, locate_model, pin_model

LogMetric = Callable[[str, float], None]
STEPS = ("validate", "provision", "train", "evaluate", "register")


@contextmanager
def step(name: str, run: RunConfig) -> Iterator[EventLog]:
    """Announce a step, and record why it fails."""
    with EventLog(run.folder / "events.jsonl") as log, recorded(name, run.folder):
        log.write(PhaseStarted(name))
        try:
            yield log
        except Exception as error:
            log.write(PhaseFailed(name, str(error) or type(error).__name__))
            raise


def validate(config: str) -> str:
    """Refuse a run that cannot succeed: settings, prompts, rewards, model, store and room on this machine.

    Returns:
        The settings with every default, as YAML; an alias of the registry is replaced by the version that it names now.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    run = parse_config(config)
    with step("validate", run):
        check_inputs(run)
        check_model(run)
        check_cluster(run)
        check_tracking(run.tracking.uri)
        check_store(run)
        check_restart(run)
        check_room(run, weights=0)
        pinned = pin_model(run)
    return pinned.to_yaml()


def provision(config: str) -> str:
    """Start what the run needs and make the model ready; what a failed try left is used again.

    Returns:
        JSON: `store`, the endpoint; `model`, the local folder; `source`, where the model came from.
    """
    run = parse_config(config)
    with step("provision", run):
        endpoint = LocalCluster(run).provision()
        model = locate_model(run)
        check_room(run, count_weights(model.path))
    return json.dumps({"store": endpoint, "model": str(model.path), "source": model.source})


def train(config: str, provisioned: str, log_metric: LogMetric) -> str:
    """Train to the end, or on from the newest checkpoint.

    Args:
        config: settings as YAML.
        provisioned: what `provision` returned; it orders the steps.
        log_metric: gets the numbers of the summary.

    Returns:
        JSON of `observe.report.Summary`.
    """
    del provisioned
    run = parse_config(config)
    from tidemill.run import train as run_train

    with step("train", run):
        summary = run_train(run)
        summary.write(run.folder / "summary.json")
    for name, value in asdict(summary).items():
        if isinstance(value, int | float):
            log_metric(name, value)
    return summary.to_json()


def evaluate(config: str, summary: str, log_metric: LogMetric) -> str:
    """Load the exported model in an engine of its own and score the held-out prompts.

    Returns:
        JSON of `protocols.Evaluation`, or `null` without `data.held_out`.
    """
    run = parse_config(config)
    trained = Summary.from_json(summary)
    with step("evaluate", run) as log:
        if run.data.held_out is None or trained.model_uri is None:
            return "null"
        evaluation = score(run, trained.model_uri)
        answers = [asdict(answer) for answer in evaluation.answers]
        log.write(EvaluationFinished(trained.steps, evaluation.score, answers))
    log_metric("held_out_score", evaluation.score)
    return json.dumps(asdict(evaluation))


def score(run: RunConfig, model: str) -> Evaluation:
    """Greedy answers of a model, wherever it lies, to the run's held-out prompts.

    Raises:
        ConfigError: the run has none.
    """
    from tidemill.scoring import score_model

    if run.data.held_out is None:
        raise ConfigError("data.held_out", None, "a file of prompts", "Name one to score a model on.")
    with TemporaryDirectory(prefix="tidemill-model-") as folder:
        return score_model(run, Locator.of(run).bring(model, Path(folder)).path)


def register(config: str, summary: str, evaluation: str, report_path: str) -> str:
    """Make the model a version of the registry if it passes the gate; write the report and `summary.json`.

    Returns:
        JSON of the summary with the model version, null if the gate refused it.
    """
    run = parse_config(config)
    with step("register", run) as log:
        final = with_times(registered(run, scored(Summary.from_json(summary), read_evaluation(evaluation))), run)
        if final.model_version is None:
            log.write(Notice(f"no model version: {final.reason('model_version')}"))
        elif (why := not_promoted(run, final)) is not None:
            log.write(Notice(f"{final.model_version} stays {run.registry.alias}: {why}"))
        final.write(run.folder / "summary.json")
        report = as_markdown(final)
        Path(report_path).write_text(report, encoding="utf-8")
        track_end(run, final, read_evaluation(evaluation), report)
    return final.to_json()


def teardown(config: str) -> None:
    """Give back what `provision` took; settings that `validate` refuses never got anything."""
    try:
        run = parse_config(config)
    except ConfigError:
        return
    LocalCluster(run).teardown()


def read_evaluation(text: str) -> Evaluation | None:
    """What `evaluate` returned."""
    tree: dict[str, Any] | None = json.loads(text)
    return None if tree is None else Evaluation(**tree | {"answers": tuple(Answer(**a) for a in tree["answers"])})


def scored(summary: Summary, evaluation: Evaluation | None) -> Summary:
    """The summary with the score and the answers of the exported model, which are the ones that count."""
    if evaluation is None:
        return summary
    after = {answer.prompt: answer.response for answer in evaluation.answers}
    samples = tuple(replace(sample, after=after.get(sample.prompt, sample.after)) for sample in summary.samples)
    return replace(summary, held_out_after=evaluation.score, samples=samples)


def registered(run: RunConfig, summary: Summary) -> Summary:
    """The summary with the new model version, or with the reason why there is none."""
    from tidemill.store.registry import gate
    from tidemill.store.registry import register as make_version

    passed, reason = gate(summary.held_out_before, summary.held_out_after, run.registry.min_score)
    for needed in ("model_uri", "mlflow_run_id"):
        if asdict(summary)[needed] is None:
            passed, reason = False, summary.reason(needed)
    if not passed:
        return replace(summary, missing={**summary.missing, "model_version": reason})
    tags = {} if summary.checkpoint_uri is None else {"checkpoint_uri": summary.checkpoint_uri}
    version = make_version(run, str(summary.model_uri), str(summary.mlflow_run_id), summary.held_out_after, tags)
    return replace(summary, model_version=f"{run.registered_model}/{version}")


def not_promoted(run: RunConfig, summary: Summary) -> str | None:
    """Make the new version the champion if it may be; else why it is not."""
    from tidemill.store.registry import promote

    version = str(summary.model_version).rpartition("/")[2]
    passed, reason = promote(run, version, summary.held_out_before, summary.held_out_after)
    return None if passed else reason


def track_end(run: RunConfig, summary: Summary, evaluation: Evaluation | None, report: str) -> None:
    """Add the exported model's score, its answers and the report to the MLflow run of the training."""
    from tidemill.store.tracking import Tracker

    if summary.mlflow_run_id is None:
        return
    tracker = Tracker.start(run, summary.mlflow_run_id)
    if evaluation is not None:
        tracker.log_evaluation(summary.steps, evaluation)
    tracker.log_text(report, "report.md")
    tracker.finish("FINISHED")


def with_times(summary: Summary, run: RunConfig) -> Summary:
    """The summary with the wall time of the newest attempt's steps; tries of one step add up."""
    events = [event for event in read_events(run.folder / "events.jsonl") if isinstance(event, PhaseStarted)]
    seconds = seconds_by_step(events, time.time())
    around = {name: value for name, value in seconds.items() if name != "train"}
    return replace(
        summary,
        total_seconds=max(summary.total_seconds, sum(seconds.values())),
        phase_seconds={**around, **summary.phase_seconds},
    )


def seconds_by_step(phases: Sequence[PhaseStarted], now: float) -> dict[str, float]:
    """Seconds from the start of each step to that of the next, since the pipeline last began."""
    steps = [phase for phase in phases if phase.name in STEPS]
    begins = [index for index, step in enumerate(steps) if step.name == STEPS[0]]
    newest = steps[begins[-1] if begins else 0 :]
    seconds: dict[str, float] = {}
    for step, end in zip(newest, [*(later.time for later in newest[1:]), now], strict=True):
        seconds[step.name] = seconds.get(step.name, 0.0) + end - step.time
    return seconds


def as_markdown(summary: Summary) -> str:
    """The report for a page of KFP."""
    text = io.StringIO()
    render(
        summary,
        Console(file=text, width=100),
        f"tidemill generate models:/{summary.model_version} PROMPT",
        "tidemill ui",
    )
    return f"# Report\n\n```\n{text.getvalue().strip()}\n```\n"
