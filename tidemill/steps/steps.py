"""What every step of the pipeline does. Text goes in and comes out, because that is what a pipeline passes on.

validate ─► provision ─► train ─► evaluate ─► register, and teardown whatever happens
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure, record_failure
from tidemill.errors import ConfigError, TidemillError
from tidemill.models.locate import pin_model
from tidemill.observe.events import EvaluationFinished, EventLog, Notice, PhaseFailed, PhaseStarted, past_events
from tidemill.observe.markdown import report
from tidemill.observe.page import Curves, page
from tidemill.observe.report import Summary, shortened
from tidemill.protocols import Answer, Evaluation, evaluation_from_json
from tidemill.steps.preflight import (
    check_inputs,
    check_model,
    check_output,
    check_restart,
    check_store,
    check_tracking,
)
from tidemill.steps.provider import provider_of
from tidemill.steps.settings_file import accept
from tidemill.tracking.mlflow_server import await_server

LONGEST_SETTINGS = 32 << 10
"""Bytes of the settings as YAML, which all steps are given."""
LogMetric = Callable[[str, float], None]
STEPS = ("validate", "provision", "train", "evaluate", "register")


@contextmanager
def step(name: str, run: RunConfig) -> Iterator[EventLog]:
    """Announce a step, and record why it fails.

    Raises:
        TidemillError: the try before this one failed in a way that no other can mend.
    """
    refuse_permanent(name, run)
    with EventLog(run.folder / "events.jsonl") as log, record_failure(name, run.folder):
        log.write(PhaseStarted(name))
        try:
            yield log
        except Exception as error:
            log.write(PhaseFailed(name, str(error) or type(error).__name__))
            raise


def refuse_permanent(name: str, run: RunConfig) -> None:
    """Fail at once where the try before did so for good: KFP tries a step again whatever its error was.

    Only what `validate` begins has such a record, and it begins without one, so that mended settings get their chance.
    A pod finds none: there training has its verdict, see `kuberay.attempts`, and what else fails for good does so soon.

    Raises:
        TidemillError: it did; in the words of that try.
    """
    if name == STEPS[0]:
        return
    failure = Failure.read(run.folder)
    if failure is not None and failure.step == name and failure.expected and not failure.retryable:
        raise TidemillError(failure.message)


def validate(config: str) -> str:
    """Refuse a run that cannot succeed: settings, prompts, rewards, model, store, and the place that it runs in.

    Settings of an earlier run that are not refused take the place of those that it had.

    Returns:
        The settings with every default, as YAML; an alias of the registry is replaced by the version that it names now.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    run = parse_config(config)
    with step("validate", run):
        pinned = checked(run)
        check_restart(pinned)
        accept(run)
    return pinned.to_yaml()


def checked(run: RunConfig) -> RunConfig:
    """Refuse a run that cannot succeed, whatever its name; see `validate`, and `tidemill check`.

    Returns:
        The settings; an alias of the registry is replaced by the version that it names now.
    """
    check_length(run)
    check_output(run)
    check_inputs(run)
    check_model(run)
    check_tracking(run.tracking.uri)
    check_store(run)
    provider_of(run).check()
    return pin_model(run)


def check_length(run: RunConfig) -> None:
    """Refuse settings that later steps could not be given: see `excerpt`.

    Raises:
        ConfigError: they are too long.
    """
    length = len(run.to_yaml().encode())
    if length > LONGEST_SETTINGS:
        fix = "Long texts belong into files: prompts into data.train, a template into the model's tokenizer."
        raise ConfigError("config", f"{length} bytes", f"at most {LONGEST_SETTINGS} with every default", fix)


def provision(config: str) -> str:
    """Take what the run needs: store and model on this machine, or a Ray cluster. What a failed try left is used again.

    Returns:
        JSON: on this machine `store`, the endpoint, `model`, the local folder, and `source`, where the model came from;
        on Kubernetes `attempt`, `job`, the RayJob, and its `namespace`.
    """
    run = parse_config(config)
    with step("provision", run) as log:
        provisioned = provider_of(run).provision(log)
    return json.dumps(provisioned)


def train(config: str, provisioned: str, log_metric: LogMetric) -> str:
    """Train to the end, or on from the newest checkpoint.

    Args:
        config: settings as YAML.
        provisioned: what `provision` returned.
        log_metric: gets the numbers of the summary.

    Returns:
        JSON of `observe.report.Summary`, its texts cut.
    """
    run = parse_config(config)
    with step("train", run) as log:
        summary = provider_of(run).train(json.loads(provisioned), log)
        summary.write(run.folder / "summary.json")
    for name, value in asdict(summary).items():
        log_number(log_metric, name, value)
    return summary.to_json()


def log_number(log_metric: LogMetric, name: str, value: object) -> None:
    """Show a value as a metric of KFP if it is a number; the JSON that KFP reads has no NaN and no infinity."""
    if isinstance(value, int | float) and math.isfinite(value):
        log_metric(name, value)


def evaluate(config: str, summary: str, log_metric: LogMetric) -> str:
    """The score of the exported model on the held-out prompts, from a fresh engine.

    Returns:
        JSON of `protocols.Evaluation` with the answers that the report shows, cut, or `null` without `data.held_out`;
        MLflow has all answers.
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


def excerpt(evaluation: Evaluation, summary: Summary) -> Evaluation:
    """The evaluation with the answers that the report shows.

    KFP hands all inputs of a step to it as one argument of a command, for which Linux has 128 KiB, and keeps them in
    etcd. MLflow has every answer in full.
    """
    asked = {sample.prompt for sample in summary.samples}
    shown: dict[str, Answer] = {}
    for answer in map(shortened, evaluation.answers):
        if answer.prompt in asked:
            shown.setdefault(answer.prompt, answer)  # prompts that are cut to the same text count once, as the first
    return replace(evaluation, answers=tuple(shown.values()))


class Pointer(Protocol):
    """KFP's artifact of a model: a small file and some metadata that say where the weights are."""

    path: str
    metadata: dict[str, Any]


def register(config: str, summary: str, evaluation: str, report_path: str, page_path: str, model: Pointer) -> str:
    """Make the model a version of the registry if it passes the gate; write the reports and `summary.json`.

    Args:
        config: settings as YAML.
        summary: what `train` returned.
        evaluation: what `evaluate` returned.
        report_path: file for the report as Markdown.
        page_path: file for the report as HTML.
        model: gets the place of the model.

    Returns:
        JSON of the summary with the model version, null if the gate refused it.
    """
    run = parse_config(config)
    with step("register", run) as log:
        trained = Summary.from_json(summary).scored(evaluation_from_json(evaluation))
        final = with_times(registered(run, trained, log), run)
        if final.model_version is None:
            log.write(Notice(f"no model version: {final.why('model_version')}"))
        elif (why := not_promoted(run, final)) is not None:
            log.write(Notice(f"{final.model_version} stays {run.registry.alias}: {why}"))
        final.write(run.folder / "summary.json")
        reports = reports_of(run, final, curves(run, final))
        for path, text in zip((report_path, page_path), reports.values(), strict=True):
            Path(path).write_text(text, encoding="utf-8")
        point(model, run, final)
        track_end(run, final, reports)
    return final.to_json()


def reports_of(run: RunConfig, summary: Summary, measured: Curves) -> dict[str, str]:
    """The report as Markdown and as a page, by the names that MLflow keeps them under."""
    return {"report.md": report(run.name, summary), "report.html": page(run.name, summary, measured)}


def point(model: Pointer, run: RunConfig, summary: Summary) -> None:
    """Say where the model is. KFP moves what lies at an artifact's path, and takes no address outside its own bucket,
    so the weights stay where they are.
    """
    known = {"run": run.name, "score": summary.held_out_after, "base_model": run.model}
    names = {"uri": summary.model_uri, "version": summary.model_version, "checkpoint_uri": summary.checkpoint_uri}
    model.metadata.update({key: value for key, value in (names | known).items() if value is not None})
    Path(model.path).write_text(json.dumps(model.metadata, indent=2), encoding="utf-8")


def curves(run: RunConfig, summary: Summary) -> Curves:
    """Rewards and scores as MLflow has them, which every step can reach, wherever it runs."""
    from tidemill.tracking.mlflow_runs import metric_history

    if summary.mlflow_run_id is None:
        return Curves()
    names = ("reward/mean", "evaluation/score")
    return Curves(*(metric_history(run, summary.mlflow_run_id, name) for name in names))


def teardown(config: str) -> None:
    """Give back what `provision` took; settings that `validate` refuses never got anything."""
    try:
        run = parse_config(config)
    except ConfigError:
        return
    provider_of(run).teardown()


def registered(run: RunConfig, summary: Summary, log: EventLog) -> Summary:
    """The summary with the new model version, or with the reason why there is none. A server that is away is waited
    for: the training is over, and there is no other way into the registry.
    """
    from tidemill.tracking.registry import gate
    from tidemill.tracking.registry import register as make_version

    passed, reason = gate(summary.held_out_before, summary.held_out_after, run.registry.min_score)
    for needed in ("model_uri", "mlflow_run_id"):
        if asdict(summary)[needed] is None:
            passed, reason = False, summary.why(needed)
    if not passed:
        return replace(summary, missing={**summary.missing, "model_version": reason})
    await_server(run, lambda text: log.write(Notice(text)))
    tags = {} if summary.checkpoint_uri is None else {"checkpoint_uri": summary.checkpoint_uri}
    version = make_version(run, str(summary.model_uri), str(summary.mlflow_run_id), summary.held_out_after, tags)
    return replace(summary, model_version=f"{run.registered_model}/{version}")


def not_promoted(run: RunConfig, summary: Summary) -> str | None:
    """Make the new version the champion if it may be; else why it is not."""
    from tidemill.tracking.registry import promote

    version = str(summary.model_version).rpartition("/")[2]
    passed, reason = promote(run, version, summary.held_out_before, summary.held_out_after)
    return None if passed else reason


def track_evaluation(run: RunConfig, summary: Summary, evaluation: Evaluation) -> None:
    """Add the exported model's score and all its answers to the MLflow run of the training."""
    from tidemill.tracking.tracker import Tracker

    if summary.mlflow_run_id is not None:
        tracker = Tracker.start(run, summary.mlflow_run_id)
        tracker.log_evaluation(summary.steps, evaluation)
        tracker.finish("FINISHED")


def track_end(run: RunConfig, summary: Summary, reports: Mapping[str, str]) -> None:
    """Add the reports to the MLflow run of the training."""
    from tidemill.tracking.tracker import Tracker

    if summary.mlflow_run_id is None:
        return
    tracker = Tracker.start(run, summary.mlflow_run_id)
    for name, text in reports.items():
        tracker.log_text(text, name)
    tracker.finish("FINISHED")


def with_times(summary: Summary, run: RunConfig) -> Summary:
    """The summary with the wall time of the newest attempt's steps; tries of one step add up."""
    events = [event for event in past_events(run.folder / "events.jsonl") if isinstance(event, PhaseStarted)]
    seconds = seconds_by_step(events, time.time())
    around = {name: value for name, value in seconds.items() if name != "train"}
    return replace(
        summary,
        total_seconds=max(summary.total_seconds, sum(seconds.values())),
        phase_seconds={**around, **summary.phase_seconds},
    )


def seconds_by_step(phases: Sequence[PhaseStarted], now: float) -> dict[str, float]:
    """Seconds from the start of each step to that of the next, since the pipeline last began.

    A pod knows of its own step only, which may be one that is not counted.
    """
    steps = [phase for phase in phases if phase.name in STEPS]
    begins = [index for index, step in enumerate(steps) if step.name == STEPS[0]]
    newest = steps[begins[-1] if begins else 0 :]
    seconds: dict[str, float] = {}
    ends = [*(step.time for step in newest), now][1:]
    for step, end in zip(newest, ends, strict=True):
        seconds[step.name] = seconds.get(step.name, 0.0) + end - step.time
    return seconds
