"""The report of a run as one self-contained HTML page: no scripts, style sheets or image files.

It follows the light or dark theme of the browser. KFP and MLflow show it in a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tidemill.observe.charts import (
    GRID_COLOR,
    REWARD_COLOR,
    SCORE_COLOR,
    TEXT_COLOR,
    Points,
    reward_svg,
    thinned,
)
from tidemill.observe.report import Fact, Sample, Summary, facts, left_out

THEMED = {REWARD_COLOR: "--line", SCORE_COLOR: "--dot", TEXT_COLOR: "--soft", GRID_COLOR: "--rule"}
"""Colours of the chart that follow the theme of the page."""
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2733; --soft: #5a6673; --rule: #e3e8ee; --line: #2563c9;
--dot: #c25e00; --good: #17803d; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --paper: #14191f; --ink: #dde4eb; --soft: #9daab8; --rule: #313c48;
--line: #78aaff; --dot: #ffa94d; --good: #5ccf87; --bad: #ff8d85 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 780px;
margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px; overflow-wrap: anywhere } h2 { font-size: 17px; margin-top: 28px }
.scores { font-size: 26px; margin: 12px 0 } .better { color: var(--good) } .worse { color: var(--bad) }
.none { color: var(--soft) } .left-out { color: var(--dot) }
.answers { table-layout: fixed } .answers th:nth-child(2) { width: 16% }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top;
padding: 4px 12px 4px 0; border-bottom: 1px solid var(--rule) } td { overflow-wrap: anywhere }
.facts td:first-child { width: 34% }
pre { margin: 0; white-space: pre-wrap; font: inherit; max-height: 15em; overflow: auto }
.legend { margin: 0; font-size: 13px } .legend span { margin-right: 24px; white-space: nowrap }
.reward { color: var(--line) }
.score { color: var(--dot) }
svg { width: 100%; height: auto; overflow: visible }
@media (max-width: 640px) { .scores { font-size: 20px } .legend span { display: block }
.answers th { display: none } .answers td { display: block; border: 0 } .answers td::before { content: attr(data-name);
color: var(--soft) } .answers td:last-child { border-bottom: 1px solid var(--rule); padding-bottom: 12px } }
"""


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured during the run.

    Attributes:
        rewards: mean reward of each step's batch.
        scores: held-out scores, step 0 before training.
    """

    rewards: Points = ()
    scores: Points = ()


def page(name: str, summary: Summary, curves: Curves, mlflow: str | None = None) -> str:
    """The report of a finished run; without curves, it says that no step was recorded.

    Args:
        name: of the run.
        summary: of the run.
        curves: of the run.
        mlflow: address of its page in MLflow.
    """
    parts = (
        f"<h1>{escape(name)}</h1>",
        scores(summary),
        f'<p class="left-out">{"<br>".join(map(escape, left_out(summary)))}</p>',
        "<h2>Reward</h2>",
        chart(curves),
        samples(summary.samples),
        "<h2>Run</h2>",
        table(facts(summary)),
        f'<p><a href="{escape(mlflow)}" target="_blank" rel="noopener">The run in MLflow</a></p>' if mlflow else "",
    )
    size = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{size}<title>{escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def scores(summary: Summary) -> str:
    """Held-out score before and after; if both are missing, one reason."""
    before, after = summary.held_out_before, summary.held_out_after
    shown = [
        f'<span class="none">{escape(summary.reason(name))}</span>' if value is None else f"{value:.3f}"
        for name, value in (("held_out_before", before), ("held_out_after", after))
    ]
    if before is None and after is None:
        del shown[1]
    gain = ""
    if before is not None and after is not None:
        kind = "better" if after > before else "worse" if after < before else "none"
        gain = f' <span class="{kind}">{after - before:+.3f}</span>'
    return f'<p class="scores">Held-out score {" &rarr; ".join(shown)}{gain}</p>'


def chart(curves: Curves) -> str:
    """Rewards as a line and held-out scores as dots, with a legend above."""
    rewards, size = thinned(curves.rewards)
    if not rewards and not curves.scores:
        return '<p class="none">(no step was recorded)</p>'
    each = "each step" if size == 1 else f"every {size} steps"
    reward = f'<span class="reward">&#8212; reward, mean of {each}</span> ' if rewards else ""
    score = '<span class="score">&#9679; held-out score</span>' if curves.scores else ""
    svg = reward_svg(rewards, curves.scores)
    for color, variable in THEMED.items():
        svg = svg.replace(color, f"var({variable})")
    return f'<p class="legend">{reward}{score}</p>{svg}'


def samples(rows: Sequence[Sample]) -> str:
    if not rows:
        return ""
    names = ("prompt", "expected", "before", "after")
    head = "".join(f"<th>{name}</th>" for name in names)
    texts = ((row.prompt, row.expected, row.before, row.after) for row in rows)
    body = "".join(f"<tr>{''.join(map(cell, names, row))}</tr>" for row in texts)
    return f'<h2>Held-out answers</h2><table class="answers"><tr>{head}</tr>{body}</table>'


def cell(name: str, text: str | None) -> str:
    """A text with its line breaks, and the name of its column, which a narrow page shows above it.

    The first letter of the text decides whether it runs from left or right.
    """
    return f'<td data-name="{name}"><pre dir="auto">{"-" if text is None else escape(text.strip())}</pre></td>'


def table(rows: Iterator[Fact]) -> str:
    body = (
        f'<tr><td>{escape(row.label)}</td><td class="{"known" if row.known else "none"}">{escape(row.text)}</td></tr>'
        for row in rows
    )
    return f'<table class="facts">{"".join(body)}</table>'
