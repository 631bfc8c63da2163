"""The report of a run as one page of HTML that needs nothing else: no script, no style sheet, no image file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tidemill.observe.progress import duration
from tidemill.observe.report import Sample, Summary

Points = Sequence[tuple[int, float]]
"""(optimizer step, value), ordered by step."""
WIDTH, HEIGHT, MARGIN = 720, 260, 44
TICKS = 4
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 780px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px } h2 { font-size: 17px; margin-top: 28px }
.scores { font-size: 26px } .better { color: #17803d } .worse { color: #b3261e } .none { color: #6b7785 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top;
padding: 4px 10px 4px 0; border-bottom: 1px solid #e3e8ee; overflow-wrap: anywhere }
pre { margin: 0; white-space: pre-wrap; font: inherit }
svg text { font: 12px system-ui, sans-serif; fill: #5a6673 }
"""


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured on the way.

    Attributes:
        rewards: mean reward of each step's batch.
        scores: held-out scores, step 0 before training.
    """

    rewards: Points = ()
    scores: Points = ()


def page(name: str, summary: Summary, curves: Curves) -> str:
    """The report of a run.

    Args:
        name: of the run.
        summary: how it ended.
        curves: what is drawn; where nothing was measured, the page says so.
    """
    parts = (
        f"<h1>{escape(name)}</h1>",
        scores(summary),
        "<h2>Reward</h2>",
        chart(curves),
        samples(summary.samples),
        "<h2>Run</h2>",
        table(facts(summary)),
    )
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def scores(summary: Summary) -> str:
    """Held-out score before and after."""
    before, after = summary.held_out_before, summary.held_out_after
    shown = [
        f'<span class="none">{escape(summary.reason(name))}</span>' if value is None else f"{value:.3f}"
        for name, value in (("held_out_before", before), ("held_out_after", after))
    ]
    gain = ""
    if before is not None and after is not None:
        kind = "better" if after > before else "worse" if after < before else "none"
        gain = f' <span class="{kind}">{after - before:+.3f}</span>'
    return f'<p class="scores">Held-out score {shown[0]} &rarr; {shown[1]}{gain}</p>'


def chart(curves: Curves) -> str:
    """Rewards as a line and held-out scores as dots, as SVG."""
    points = [*curves.rewards, *curves.scores]
    if not points:
        return '<p class="none">(no step was recorded)</p>'
    frame = Frame.around(points)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(frame.place, curves.rewards))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#e07b00"/>' for x, y in map(frame.place, curves.scores)
    )
    legend = (
        f'<text x="{MARGIN}" y="14" style="fill:#2563c9">training reward, mean of each step</text>'
        f'<text x="{MARGIN + 260}" y="14" style="fill:#e07b00">held-out score, greedy</text>'
    )
    drawn = f'<polyline points="{line}" fill="none" stroke="#2563c9" stroke-width="2"/>{dots}'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="reward by optimizer step"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{legend}{"".join(frame.grid())}{drawn}</svg>'


@dataclass(frozen=True, slots=True)
class Frame:
    """The plane of a chart: steps from left to right, values from bottom to top."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Points) -> Frame:
        """As much as the points need; a single value gets some room."""
        steps, values = zip(*points, strict=True)
        low, high = min(values), max(values)
        room = 0.0 if high > low else 0.5
        return cls(min(steps), max(*steps, min(steps) + 1), low - room, high + room)

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """Where a (step, value) stands in the drawing."""
        step, value = point
        across, up = (step - self.first) / (self.last - self.first), (value - self.low) / (self.high - self.low)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    def grid(self) -> Iterator[str]:
        """Lines and numbers."""
        for tick in range(TICKS + 1):
            share = tick / TICKS
            step = round(self.first + share * (self.last - self.first))
            value = self.low + share * (self.high - self.low)
            x, y = self.place((step, value))
            yield f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ee"/>'
            yield f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'
            yield f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step}</text>'
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer step</text>'


def samples(rows: Sequence[Sample]) -> str:
    """Held-out prompts with the answers before and after."""
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "before", "after", "expected"))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td><pre>{'-' if cell is None else escape(cell.strip())}</pre></td>"
            for cell in (row.prompt, row.before, row.after, row.expected)
        )
        + "</tr>"
        for row in rows
    )
    return f"<h2>Held-out answers</h2><table><tr>{head}</tr>{body}</table>"


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """Everything else, (name, value); a missing value says why."""
    yield "steps", f"{summary.steps} in {duration(summary.train_seconds)} (whole run {duration(summary.total_seconds)})"
    yield "trained tokens/s", f"{summary.tokens_per_second:,.0f}"
    for name, label, form in (
        ("trainer_idle", "trainer idle", "{:.1%}"),
        ("rollouter_idle", "rollouter idle", "{:.1%}"),
        ("max_age", "oldest trained token, versions behind", "{}"),
        ("checkpoint_uri", "checkpoint", "{}"),
        ("model_uri", "model", "{}"),
        ("model_version", "model version", "{}"),
        ("mlflow_run_id", "MLflow run", "{}"),
    ):
        value = summary.to_dict()[name]
        yield label, summary.reason(name) if value is None else form.format(value)
    for title, counts in (("skipped prompts", summary.skipped), ("dropped groups", summary.dropped)):
        yield from ((f"{title}: {reason}", str(count)) for reason, count in counts.items() if count)


def table(rows: Iterator[tuple[str, str]]) -> str:
    """Two columns."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{body}</table>"
