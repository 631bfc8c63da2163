"""The summary of a finished run, and its report on the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.errors import DataError
from tidemill.observe.text import counted, duration, excerpt
from tidemill.protocols import Answer, Evaluation

CELL = 300
"""Characters of a cell on the terminal and in Markdown; the HTML page has more."""
WHY_MISSING = {
    "held_out_before": "data.held_out is not set",
    "held_out_after": "data.held_out is not set",
    "checkpoint_uri": "no checkpoint was written",
    "model_uri": "no model was exported",
    "model_version": "not registered",
    "mlflow_run_id": "not tracked",
    "max_age": "no group was trained",
    "trainer_idle": "this attempt trained no step",
    "rollouter_idle": "this attempt trained no step",
    "peak_memory_bytes": "not measured in a cluster",
}
FACTS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("trainer_idle", "trainer idle", "{:.1%}".format),
    ("rollouter_idle", "rollouter idle", "{:.1%}".format),
    ("max_age", "oldest trained token", lambda age: f"{counted(age, 'version')} behind"),
    ("peak_memory_bytes", "peak memory", lambda nbytes: f"{nbytes / 2**30:.2f} GiB"),
    ("checkpoint_uri", "checkpoint", str),
    ("model_uri", "model", str),
    ("model_version", "model version", str),
    ("mlflow_run_id", "MLflow run", str),
)
"""Field of the summary, label and format."""

REASONS = {"restart": "in flight at a restart; their prompts were issued again"}
"""Reasons that need more words than their counter has."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A held-out prompt and its answers before and after training, as excerpts; None without an answer."""

    prompt: str
    before: str | None
    after: str | None
    expected: str | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The content of `summary.json`; a missing value is None, and `missing` may give the reason.

    Attributes:
        steps: done by the trainer.
        held_out_before, held_out_after: mean reward on the held-out prompts.
        train_seconds: wall time of the steps, of all attempts up to the checkpoint from which the next one continued.
        total_seconds: wall time of all attempts, also of what a later attempt repeated. On this machine: all steps of
            the pipeline. On Kubernetes: while the run had pods, and the step `register`. Neither includes the time
            between a failure and a later `--resume`.
        tokens_per_second: trained response tokens over `train_seconds`.
        trainer_idle, rollouter_idle: share of the steps' time spent waiting, in `[0, 1]`, of the last attempt.
        max_age: largest age of a trained token, in policy versions.
        peak_memory_bytes: of all processes of the run together.
        checkpoint_uri, model_uri: in the object store.
        model_version: `NAME/VERSION` in the registry.
        mlflow_run_id: id of the run in MLflow.
        samples: held-out prompts with the answers before and after.
        skipped: prompts that were never trained, by reason.
        dropped: groups that were generated but not trained, by reason; their prompts were issued again.
        phase_seconds: wall time by phase, of the last attempt.
        metrics: aggregated over the steps of the last attempt by `observe.metrics.RULES`.
        missing: why a field is None, by its name.
        stopped: why the run ended before its last step; None if it did not.
        restarts: how often the training continued from a checkpoint.
    """

    steps: int
    held_out_before: float | None
    held_out_after: float | None
    train_seconds: float
    total_seconds: float
    tokens_per_second: float
    trainer_idle: float | None
    rollouter_idle: float | None
    max_age: int | None
    peak_memory_bytes: int | None
    checkpoint_uri: str | None
    model_uri: str | None
    model_version: str | None
    mlflow_run_id: str | None
    samples: Sequence[Sample] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    stopped: str | None = None
    restarts: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """The inverse of `to_json`.

        Raises:
            DataError: the text is not a summary, or keys are missing or unknown.
        """
        try:
            value = json.loads(text)
            samples = tuple(Sample(**sample) for sample in value["samples"])
            return cls(**{**value, "samples": samples})
        except (ValueError, KeyError, TypeError) as error:
            names = [f.name for f in fields(cls)]
            raise DataError(f"not a summary of a run: {error}; its keys are {names}") from error

    def write(self, path: str | Path) -> None:
        """Write as JSON, atomically: a reader sees the old or the new file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Summary:
        """The inverse of `write`.

        Raises:
            DataError: the file does not exist, or it is not a summary.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a readable summary: {error}") from error
        return cls.from_json(text)

    def scored(self, evaluation: Evaluation | None) -> Summary:
        """The summary with the score and answers of the final policy; unchanged without an evaluation."""
        if evaluation is None:
            return self
        after = {answer.prompt: answer.response for answer in evaluation.answers}
        samples = tuple(replace(sample, after=after.get(sample.prompt, sample.after)) for sample in self.samples)
        return replace(self, held_out_after=evaluation.score, samples=samples)

    def why(self, name: str) -> str:
        """Why the field `name` is None."""
        return self.missing.get(name, WHY_MISSING.get(name, "not measured"))

    def reason(self, name: str) -> str:
        """`why` in brackets."""
        return f"({self.why(name)})"


def render(summary: Summary, console: Console, generate_command: str, ui_command: str) -> None:
    """Print the report of a run.

    Args:
        summary: of the run.
        console: at least 80 columns wide.
        generate_command: shell command that prompts the trained model.
        ui_command: shell command that opens MLflow, or its address.
    """
    console.print()
    console.print(scores(summary))
    if summary.samples:
        console.print(answers(summary.samples))
    console.print(run_table(summary))
    for line in left_out(summary):
        console.print(Text(line, style="yellow"), soft_wrap=True)
    if summary.model_uri is not None:
        console.print(
            Text("\nAsk the trained model:"), Text(f"  {generate_command}", style="bold"), sep="\n", soft_wrap=True
        )
    if summary.mlflow_run_id is not None:
        console.print(Text("\nSee it in MLflow:"), Text(f"  {ui_command}", style="bold"), sep="\n", soft_wrap=True)


def scores(summary: Summary) -> Text:
    """The main result: held-out score before and after training."""
    before, after = summary.held_out_before, summary.held_out_after
    text = Text("Held-out score  ", style="bold")
    text.append(summary.reason("held_out_before") if before is None else f"{before:.3f}")
    if not (before is None and after is None):
        text.append("  ->  ")
        text.append(summary.reason("held_out_after") if after is None else f"{after:.3f}")
    if before is not None and after is not None:
        gain = after - before
        text.append(f"  ({gain:+.3f})", style="green" if gain > 0 else "red" if gain < 0 else "")
    return text


def answers(samples: Sequence[Sample]) -> Table:
    table = Table(title="Held-out answers", title_justify="left", expand=True)
    for name in ("prompt", "expected", "before", "after"):
        table.add_column(name, overflow="fold", ratio=1 if name == "expected" else 2)
    for sample in samples:
        row = (sample.prompt, sample.expected, sample.before, sample.after)
        table.add_row(*(Text("-" if cell is None else excerpt(cell, CELL)) for cell in row))
    return table


def run_table(summary: Summary) -> Table:
    """One row per fact; a missing value gives its reason, in grey."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts(summary):
        table.add_row(fact.label, Text(fact.text, style="" if fact.known else "dim"))
    return table


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of the report, on the terminal, in Markdown and in HTML.

    Attributes:
        label: shown to people.
        text: the value with its unit, or why it is missing.
        known: whether the value exists.
    """

    label: str
    text: str
    known: bool = True


def facts(summary: Summary) -> Iterator[Fact]:
    """All rows of the report."""
    training, whole = duration(summary.train_seconds), duration(summary.total_seconds)
    yield Fact("steps", f"{summary.steps} in {training} (whole run, all attempts: {whole})")
    if summary.stopped is not None:
        yield Fact("stopped early", excerpt(summary.stopped))
    if summary.restarts:
        yield Fact("restarts", f"{summary.restarts}, each from the newest checkpoint")
    yield Fact("trained tokens/s", f"{summary.tokens_per_second:,.0f}")
    yield from (value_or_reason(summary, *row) for row in FACTS)
    if summary.phase_seconds:
        parts = (f"{name} {duration(seconds)}" for name, seconds in summary.phase_seconds.items())
        yield Fact("time by phase", ", ".join(parts))


def value_or_reason(summary: Summary, name: str, label: str, form: Callable[[Any], str]) -> Fact:
    """The formatted value of a field, or why it is missing."""
    value = asdict(summary)[name]
    if value is None:
        return Fact(label, summary.reason(name), known=False)
    return Fact(label, form(value))


def left_out(summary: Summary) -> Iterator[str]:
    """What was not trained, one line per reason."""
    for name, counts in (("skipped prompts", summary.skipped), ("dropped groups", summary.dropped)):
        yield from (f"{name}: {count} ({REASONS.get(reason, reason)})" for reason, count in counts.items() if count)
    if masked := summary.metrics.get("staleness/masked_tokens"):
        sampled = summary.metrics["response/tokens"]
        yield f"masked tokens: {masked:,.0f} of {sampled:,.0f} (too old, in the last attempt)"


def shortened(answer: Answer) -> Answer:
    """The answer with excerpts of its texts, as the report shows it."""
    expected = None if answer.expected is None else excerpt(answer.expected)
    return replace(answer, prompt=excerpt(answer.prompt), response=excerpt(answer.response), expected=expected)
