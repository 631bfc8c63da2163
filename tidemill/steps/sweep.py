"""A sweep: the same run with several sets of overrides, each a run of its own; the best one is registered.

In MLflow the variants stand below one run of the sweep; see `tracking.mlflow_runs.VARIANT` for how they find it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.markdown import links
from tidemill.observe.report import Summary
from tidemill.protocols import evaluation_from_json
from tidemill.steps.request import Request, entries, renamed
from tidemill.steps.steps import (
    Pointer,
    curves,
    log_number,
    register,
    reports_of,
    step,
    track_end,
    validate,
    with_times,
)
from tidemill.store.server import open_store

MOST = 32
"""Variants of one sweep: each is five pods of KFP besides its cluster."""
SHARED = ("name", "output", "store", "tracking")
"""Settings that all variants of a sweep have in common, because it looks for them there."""
LogMetric = Callable[[str, float], None]


def variants(request: Request, text: str) -> Iterator[RunConfig]:
    """The settings of every variant, called `SWEEP-v1`, `SWEEP-v2` and so on.

    Args:
        request: what all have in common.
        text: the variants, see `request.entries`; each is its overrides with spaces between them, quotes as in a shell.

    Raises:
        ConfigError: there is none, there are too many, or one is wrong.
    """
    lines = entries("variants", text)
    if not 1 <= len(lines) <= MOST:
        fix = "Write one a line, for example: trainer.learning_rate=1e-5 seed=3"
        raise ConfigError("variants", len(lines), f"1 to {MOST} variants", fix)
    for number, line in enumerate(lines, start=1):
        yield variant(request, number, line)


def variant(request: Request, number: int, line: str) -> RunConfig:
    """The settings of one variant."""
    try:
        own = shlex.split(line)
    except ValueError as error:
        raise ConfigError("variants", line, "overrides with spaces between them", f"{error}.") from error
    refuse_without_effect(request, line, [override.partition("=")[0] for override in own])
    config = request.settings(own)
    return renamed(config, f"{config.name}-v{number}")


def refuse_without_effect(request: Request, line: str, keys: Sequence[str]) -> None:
    """Refuse what a variant cannot choose by itself: where the sweep is told of, and what the form says for all.

    Raises:
        ConfigError: naming the setting.
    """
    filled = [field.partition("=")[0] for field in request.fields()]
    for key in keys:
        if key.partition(".")[0] in SHARED:
            fix = "Write it into the overrides of the sweep, which are for all."
            raise ConfigError("variants", line, f"overrides other than {key}", fix)
        if key in filled:
            fix = "Leave that field open, or the setting out of the variants."
            raise ConfigError("variants", line, f"overrides other than {key}, which a field of the form sets", fix)


def validate_sweep(request: Request, text: str, page: str) -> list[str]:
    """Refuse a sweep of which one variant cannot succeed, and write where to look while it goes on.

    Args:
        request: what all variants have in common.
        text: see `variants`.
        page: file for the page of links.

    Returns:
        The resolved settings of every variant as YAML.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    from tidemill.tracking.mlflow_runs import open_sweep

    base, configs = request.settings(), list(variants(request, text))
    if base.data.held_out is None:
        raise ConfigError("data.held_out", None, "held-out prompts: they say which variant is best", "Name a file.")
    Path(page).write_text("\n".join(links(config, request.kfp_run) for config in configs), encoding="utf-8")
    checked = [validate(config.to_yaml()) for config in configs]
    open_sweep(base, [config.name for config in configs])
    return checked


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a variant ended; short, because `select_best` gets those of all variants in one argument.

    Attributes:
        name: of its run.
        before, after: held-out scores.
        steps: of its training.
    """

    name: str
    before: float | None
    after: float | None
    steps: int

    @property
    def score(self) -> float:
        """Held-out score; a variant without one, or with NaN, is worse than all others."""
        return float("-inf") if self.after is None or math.isnan(self.after) else self.after


def result_key(run: str) -> str:
    """Object of the store with what `register` needs of a variant: its settings and its summary."""
    return f"runs/{run}/result.json"


def finish_variant(config: str, summary: str, evaluation: str, log_metric: LogMetric) -> str:
    """The end of a variant: its reports, without a version in the registry.

    Returns:
        JSON of `Outcome`; the store has the rest.
    """
    run, scores = parse_config(config), evaluation_from_json(evaluation)
    with step("finish_variant", run):
        final = with_times(Summary.from_json(summary).scored(scores), run)
        final.write(run.folder / "summary.json")
        track_end(run, final, reports_of(run, final, curves(run, final)))
        with open_store(run.store, run.output) as store:
            whole = json.dumps({"config": config, "summary": final.to_json()})
            store.put_bytes(result_key(run.name), whole.encode())
    log_number(log_metric, "held_out_score", final.held_out_after)
    return json.dumps(asdict(Outcome(run.name, final.held_out_before, final.held_out_after, final.steps)))


def select_best(sweep: Request, results: Sequence[str], report_path: str, page_path: str, model: Pointer) -> str:
    """Register the variant with the best held-out score, if it passes the gate; of equal ones the first.

    Args:
        sweep: what all variants have in common.
        results: what `finish_variant` returned for each.
        report_path: file for the table of variants and the report of the best one, as Markdown.
        page_path: file for the report of the best one as HTML.
        model: gets the place of the best model.

    Returns:
        JSON of the best one's summary, with the model version, null if the gate refused it.
    """
    from tidemill.tracking.mlflow_runs import close_sweep

    base, outcomes = sweep.settings(), [Outcome(**json.loads(text)) for text in results]
    best = max(outcomes, key=lambda outcome: outcome.score)
    with open_store(base.store, base.output) as store:
        whole = json.loads(store.get_bytes(result_key(best.name)))
    final = register(whole["config"], whole["summary"], "null", report_path, page_path, model)
    report = f"{table(outcomes, best)}\n{Path(report_path).read_text(encoding='utf-8')}"
    Path(report_path).write_text(report, encoding="utf-8")
    scores = {outcome.name: outcome.after for outcome in outcomes if outcome.after is not None}
    close_sweep(base, scores, best.name, report)
    return final


def table(outcomes: Sequence[Outcome], best: Outcome) -> str:
    """The variants, best first."""
    rows = (
        f"| {outcome.name}{' (best)' if outcome is best else ''} | {shown(outcome.before)} | {shown(outcome.after)} "
        f"| {outcome.steps} |"
        for outcome in sorted(outcomes, key=lambda outcome: -outcome.score)
    )
    return "\n".join(["# Sweep", "", "| variant | before | after | steps |", "|---|---|---|---|", *rows, ""])


def shown(score: float | None) -> str:
    """A score, or that there is none."""
    return "-" if score is None else f"{score:.3f}"
