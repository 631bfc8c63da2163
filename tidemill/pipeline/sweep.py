"""A sweep: the same run with several sets of overrides, each a run of its own; the best one is registered.

In MLflow the variants stand below one run of the sweep; see `tracking.VARIANT` for how they find it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill.config import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.links import links
from tidemill.observe.report import Summary
from tidemill.pipeline.request import Request, renamed
from tidemill.pipeline.steps import (
    Pointer,
    curves,
    register,
    reports_of,
    scored,
    step,
    track_end,
    validate,
    with_times,
)
from tidemill.protocols import evaluation_from_json
from tidemill.run_file import parse_config

MOST = 32
"""Variants of one sweep: each is five pods of KFP besides its cluster."""
LogMetric = Callable[[str, float], None]


def variants(request: Request, text: str) -> Iterator[RunConfig]:
    """The settings of every variant, called `SWEEP-v1`, `SWEEP-v2` and so on.

    Args:
        request: what all have in common.
        text: a variant a line, its overrides with spaces between them; quotes as in a shell.

    Raises:
        ConfigError: there is none, there are too many, or one is wrong.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
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
    config = replace(request, overrides="\n".join([request.overrides, *own])).settings()
    return renamed(config, f"{config.name}-v{number}")


def begin_sweep(request: Request, text: str, page: str) -> list[str]:
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
    from tidemill.store.tracking import open_sweep

    base, configs = request.settings(), list(variants(request, text))
    if base.data.held_out is None:
        raise ConfigError("data.held_out", None, "held-out prompts: they say which variant is best", "Name a file.")
    Path(page).write_text("\n".join(links(config, request.kfp_run) for config in configs), encoding="utf-8")
    checked = [validate(config.to_yaml()) for config in configs]
    open_sweep(base, [config.name for config in configs])
    return checked


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a variant ended.

    Attributes:
        config: its settings.
        summary: with its held-out score.
    """

    config: RunConfig
    summary: Summary

    @classmethod
    def read(cls, text: str) -> Outcome:
        """What `conclude` returned."""
        tree = json.loads(text)
        return cls(parse_config(tree["config"]), Summary.from_json(tree["summary"]))

    @property
    def score(self) -> float:
        """Held-out score; a variant without one is worse than all others."""
        return float("-inf") if self.summary.held_out_after is None else self.summary.held_out_after


def conclude(config: str, summary: str, evaluation: str, log_metric: LogMetric) -> str:
    """The end of a variant: its reports, without a version in the registry.

    Returns:
        JSON of `config` and `summary`.
    """
    run, scores = parse_config(config), evaluation_from_json(evaluation)
    with step("conclude", run):
        final = with_times(scored(Summary.from_json(summary), scores), run)
        final.write(run.folder / "summary.json")
        track_end(run, final, reports_of(run, final, curves(run, final)))
    if final.held_out_after is not None:
        log_metric("held_out_score", final.held_out_after)
    return json.dumps({"config": config, "summary": final.to_json()})


def choose(sweep: Request, results: Sequence[str], report_path: str, page_path: str, model: Pointer) -> str:
    """Register the variant with the best held-out score, if it passes the gate; of equal ones the first.

    Args:
        sweep: what all variants have in common.
        results: what `conclude` returned for each.
        report_path: file for the table of variants and the report of the best one, as Markdown.
        page_path: file for the report of the best one as HTML.
        model: gets the place of the best model.

    Returns:
        JSON of the best one's summary, with the model version, null if the gate refused it.
    """
    from tidemill.store.tracking import close_sweep

    outcomes = [Outcome.read(text) for text in results]
    best = max(outcomes, key=lambda outcome: outcome.score)
    final = register(best.config.to_yaml(), best.summary.to_json(), "null", report_path, page_path, model)
    report = f"{table(outcomes, best)}\n{Path(report_path).read_text(encoding='utf-8')}"
    Path(report_path).write_text(report, encoding="utf-8")
    close_sweep(
        sweep.settings(), {outcome.config.name: outcome.score for outcome in outcomes}, best.config.name, report
    )
    return final


def table(outcomes: Sequence[Outcome], best: Outcome) -> str:
    """The variants, best first."""
    ranked = sorted(outcomes, key=lambda outcome: -outcome.score)
    rows = (
        f"| {outcome.config.name}{' (best)' if outcome is best else ''} | {shown(outcome.summary.held_out_before)} "
        f"| {shown(outcome.summary.held_out_after)} | {outcome.summary.steps} |"
        for outcome in ranked
    )
    return "\n".join(["# Sweep", "", "| variant | before | after | steps |", "|---|---|---|---|", *rows, ""])


def shown(score: float | None) -> str:
    """A score, or that there is none."""
    return "-" if score is None else f"{score:.3f}"
