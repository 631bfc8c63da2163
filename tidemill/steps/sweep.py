"""A sweep: runs that differ in some settings, of which the best is registered.

In MLflow the runs of the variants are children of the run of the sweep; see `mlflow_runs.VARIANT`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.markdown import links
from tidemill.observe.report import Summary
from tidemill.protocols import evaluation_from_json
from tidemill.steps.refusal import explained
from tidemill.steps.register import ModelArtifact, finish, register, with_step_times
from tidemill.steps.request import Request, entries, renamed
from tidemill.steps.run_folder import step
from tidemill.steps.training import LogMetric, log_number
from tidemill.steps.validate import validate_run
from tidemill.store.server import open_store
from tidemill.tracking.mlflow_runs import close_sweep, open_sweep
from tidemill.tracking.mlflow_server import experiment_of

MAX_VARIANTS = 32
"""Each is five pods of KFP besides its cluster."""
SHARED = ("name", "output", "store", "tracking")
"""Settings that a variant cannot change, because the sweep finds its variants by them."""


def variant_configs(request: Request, text: str) -> Iterator[RunConfig]:
    """The settings of every variant, named `SWEEP-v1`, `SWEEP-v2` and so on.

    Args:
        request: the parameters of the sweep.
        text: the variants, see `request.entries`; each has overrides separated by spaces, quoted as in a shell.

    Raises:
        ConfigError: no or too many variants, or an invalid one.
    """
    lines = entries("variants", text)
    if not 1 <= len(lines) <= MAX_VARIANTS:
        fix = "Write one a line, for example: trainer.learning_rate=1e-5 seed=3"
        raise ConfigError("variants", len(lines), f"1 to {MAX_VARIANTS} variants", fix)
    for number, line in enumerate(lines, start=1):
        try:
            overrides = shlex.split(line)
        except ValueError as error:
            raise ConfigError("variants", line, "overrides separated by spaces", f"{error}.") from error
        check_keys(request, line, [override.partition("=")[0] for override in overrides])
        config = request.settings(overrides)
        yield renamed(config, f"{config.name}-v{number}")


def check_keys(request: Request, line: str, keys: Sequence[str]) -> None:
    """Refuse overrides that would have no effect, or would separate a variant from its sweep.

    Raises:
        ConfigError: naming the setting.
    """
    filled = [field.partition("=")[0] for field in request.fields()]
    for key in keys:
        if key.partition(".")[0] in SHARED:
            fix = "Write it into the overrides of the sweep, which apply to all variants."
            raise ConfigError("variants", line, f"overrides other than {key}", fix)
        if key in filled:
            fix = "Leave that field empty, or remove the setting from the variants."
            raise ConfigError("variants", line, f"overrides other than {key}, which a field of the form sets", fix)


@explained()
def validate_sweep(request: Request, text: str, page: str) -> list[str]:
    """Refuse a sweep with a variant that cannot succeed, and write the page of links.

    Args:
        request: the parameters of the sweep.
        text: see `variant_configs`.
        page: file for the links to follow the runs.

    Returns:
        The settings of every variant with every default, as YAML.

    Raises:
        TidemillError: naming what is wrong and what to do.
    """
    base, configs = request.settings(), list(variant_configs(request, text))
    if base.data.held_out is None:
        raise ConfigError("data.held_out", None, "held-out prompts, which select the best variant", "Name a file.")
    write_links(configs, request.kfp_run, page)
    checked = [validate_run(config).to_yaml() for config in configs]
    write_links(configs, request.kfp_run, page, experiment_of(base))
    open_sweep(base, [config.name for config in configs])
    return checked


def write_links(configs: Sequence[RunConfig], kfp_run: str, page: str, experiment: str | None = None) -> None:
    """Write the links and settings of every variant; see `observe.markdown.links`."""
    Path(page).write_text("\n".join(links(config, kfp_run, experiment) for config in configs), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The result of a variant; short, because `select_best` gets those of all variants in one argument.

    Attributes:
        name: of the run.
        before, after: held-out scores.
        steps: optimizer steps of the training.
    """

    name: str
    before: float | None
    after: float | None
    steps: int

    @property
    def score(self) -> float:
        """Held-out score; -inf if it is missing or NaN."""
        return float("-inf") if self.after is None or math.isnan(self.after) else self.after


def result_key(run: str) -> str:
    """Key in the store of the settings and the summary of a variant."""
    return f"runs/{run}/result.json"


@explained()
def finish_variant(config: str, summary: str, evaluation: str, log_metric: LogMetric) -> str:
    """Write the reports of a variant, which gets no version in the registry, and store its settings and summary.

    Returns:
        JSON of `VariantResult`.
    """
    run, scores = parse_config(config), evaluation_from_json(evaluation)
    with step("finish_variant", run):
        final = with_step_times(Summary.from_json(summary).scored(scores), run)
        finish(run, final)
        with open_store(run.store, run.output) as store:
            stored = json.dumps({"config": config, "summary": final.to_json()})
            store.put_bytes(result_key(run.name), stored.encode())
    log_number(log_metric, "held_out_score", final.held_out_after)
    return json.dumps(asdict(VariantResult(run.name, final.held_out_before, final.held_out_after, final.steps)))


@explained()
def select_best(sweep: Request, results: Sequence[str], report_path: str, page_path: str, model: ModelArtifact) -> str:
    """Register the variant with the best held-out score if it passes the gate; of equal scores, the first.

    Args:
        sweep: the parameters of the sweep.
        results: results of `finish_variant`.
        report_path: file for the table of variants and the report of the best one, as Markdown.
        page_path: file for the report of the best one as HTML.
        model: gets the location of the best model.

    Returns:
        JSON of the summary of the best variant with the model version, null if the gate refused it.
    """
    base, variants = sweep.settings(), [VariantResult(**json.loads(text)) for text in results]
    best = max(variants, key=lambda variant: variant.score)
    with open_store(base.store, base.output) as store:
        stored = json.loads(store.get_bytes(result_key(best.name)))
    final = register(stored["config"], stored["summary"], "null", report_path, page_path, model)
    report = f"{table(variants, best)}\n{Path(report_path).read_text(encoding='utf-8')}"
    Path(report_path).write_text(report, encoding="utf-8")
    scores = {variant.name: variant.after for variant in variants if variant.after is not None}
    close_sweep(base, scores, best.name, report)
    return final


def table(variants: Sequence[VariantResult], best: VariantResult) -> str:
    """The variants as Markdown, best first."""

    def shown(score: float | None) -> str:
        return "-" if score is None else f"{score:.3f}"

    rows = (
        f"| {each.name}{' (best)' * (each is best)} | {shown(each.before)} | {shown(each.after)} | {each.steps} |"
        for each in sorted(variants, key=lambda variant: -variant.score)
    )
    return "\n".join(["# Sweep", "", "| variant | before | after | steps |", "|---|---|---|---|", *rows, ""])
