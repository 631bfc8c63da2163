"""The report of a run as Markdown, for the pages of KFP and MLflow: tables of their own, no HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tidemill.observe.excerpt import excerpt
from tidemill.observe.report import CELL, Sample, Summary, facts, left_out, scores

SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$#])")


def report(name: str, summary: Summary) -> str:
    """The report.

    Args:
        name: of the run.
        summary: how it ended.
    """
    model = summary.model_uri if summary.model_version is None else f"models:/{summary.model_version}"
    parts = [
        f"# {escaped(name)}",
        f"**{escaped(str(scores(summary)))}**",
        *(f"- {escaped(line)}" for line in left_out(summary)),
        table(("run", ""), [(fact.label, fact.text) for fact in facts(summary)]),
        answers(summary.samples),
        f"Ask the trained model: `tidemill generate {model} PROMPT`" if model else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def answers(samples: Sequence[Sample]) -> str:
    """Held-out prompts with the answers before and after."""
    if not samples:
        return ""
    rows = ((row.prompt, row.before, row.after, row.expected) for row in samples)
    return "## Held-out answers\n\n" + table(("prompt", "before", "after", "expected"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Rows of texts, which show as they are; None is a dash."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str | None) -> str:
    """A text in one line."""
    return "-" if text is None else escaped(" ".join(excerpt(text, CELL).split()))


def escaped(text: str) -> str:
    """A text without anything that Markdown takes for its own."""
    return SPECIAL.sub(r"\\\1", text)
