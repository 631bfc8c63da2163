"""The report of a run as one page of HTML that needs nothing else: no script, no style sheet, no image file.

It follows the light or dark theme of the browser, and KFP and MLflow show it as it is, in a frame of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tidemill.observe.report import Fact, Sample, Summary, facts, left_out

Points = Sequence[tuple[int, float]]
"""(step, value), ordered by step."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 720, 260, 52, 24, 12, 40
TICKS = 5
MOST_POINTS = 500
"""Of a line; what is closer together on the screen only hides the course of a long run."""
TINY = 1e-9
"""Of rounding, relative to the distance of two lines of a grid."""
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
.wide { overflow-x: auto } .wide table { min-width: 560px; table-layout: fixed } .wide th { width: 29% }
.wide th:last-child { width: 13% }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top;
padding: 4px 12px 4px 0; border-bottom: 1px solid var(--rule) } td { overflow-wrap: anywhere }
.facts td:first-child { width: 34% }
pre { margin: 0; white-space: pre-wrap; font: inherit; max-height: 15em; overflow: auto }
.legend { margin: 0; font-size: 13px } .legend span { margin-right: 24px } .reward { color: var(--line) }
.score { color: var(--dot) }
svg { overflow: visible } svg text { font: 12px system-ui, sans-serif; fill: var(--soft) }
svg line { stroke: var(--rule) }
polyline { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
circle { fill: var(--dot) }
@media (max-width: 560px) { svg text { font-size: 20px } .scores { font-size: 20px } }
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
        f'<p class="left-out">{"<br>".join(map(escape, left_out(summary)))}</p>',
        "<h2>Reward</h2>",
        chart(curves),
        samples(summary.samples),
        "<h2>Run</h2>",
        table(facts(summary)),
    )
    size = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{size}<title>{escape(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def scores(summary: Summary) -> str:
    """Held-out score before and after; one reason is enough where there is neither."""
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
    """Rewards as a line and held-out scores as dots, as SVG, with its legend above."""
    rewards, steps = thinned(curves.rewards)
    points = [*rewards, *curves.scores]
    if not points:
        return '<p class="none">(no step was recorded)</p>'
    frame = Frame.around(points)
    drawn = "".join([*frame.grid(), line(frame, rewards), *(dot(frame, point) for point in curves.scores)])
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="reward by step of the trainer"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{drawn}</svg>'
    each = "each step" if steps == 1 else f"every {steps} steps"
    reward = f'<span class="reward">&#8212; training reward, mean of {each}</span> ' if rewards else ""
    score = '<span class="score">&#9679; held-out score, greedy</span>' if curves.scores else ""
    return f'<p class="legend">{reward}{score}</p>{svg}'


def thinned(points: Points) -> tuple[Points, int]:
    """At most `MOST_POINTS`, each the mean of so many at its last step."""
    many = math.ceil(len(points) / MOST_POINTS)
    if many <= 1:
        return points, 1
    parts = (points[start : start + many] for start in range(0, len(points), many))
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts], many


def line(frame: Frame, points: Points) -> str:
    """Points, joined; a single one is a thick dot."""
    places = [frame.place(point) for point in points]
    thick = ' style="stroke-width:7"' if len(places) == 1 else ""
    ends = " ".join(f"{x:.1f},{y:.1f}" for x, y in (places * 2 if thick else places))
    return f'<polyline points="{ends}"{thick}/>'


def dot(frame: Frame, point: tuple[int, float]) -> str:
    """A held-out score, which shows its number under the pointer."""
    x, y = frame.place(point)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>step {point[0]}: {point[1]:.3f}</title></circle>'


@dataclass(frozen=True, slots=True)
class Frame:
    """The plane of a chart: steps from left to right, values from bottom to top."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Points) -> Frame:
        """As much as the points need, up to the next line of the grid; a single value gets some room."""
        steps, values = zip(*points, strict=True)
        low, high = min(values), max(values)
        room = 0.0 if high > low else 0.5
        every = distance(low - room, high + room)
        bottom, top = math.floor((low - room) / every + TINY), math.ceil((high + room) / every - TINY)
        return cls(min(steps), max(*steps, min(steps) + 1), bottom * every, top * every)

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """Where a (step, value) stands in the drawing."""
        step, value = point
        across, up = (step - self.first) / (self.last - self.first), (value - self.low) / (self.high - self.low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - FOOT - up * (HEIGHT - FOOT - TOP)

    def grid(self) -> Iterator[str]:
        """Lines and numbers."""
        for value, label in ticks(self.low, self.high, distance(self.low, self.high)):
            _, y = self.place((self.first, value))
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for step, label in ticks(self.first, self.last, max(1.0, distance(self.first, self.last))):
            x, _ = self.place((step, self.low))
            yield f'<text x="{x:.1f}" y="{HEIGHT - FOOT + 18}" text-anchor="middle">{label}</text>'
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">step of the trainer</text>'


def distance(low: float, high: float) -> float:
    """Between the lines of a grid: 1, 2 or 5 times a power of ten, so that there are at most about `TICKS` parts."""
    wanted = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(size * power for size in (1, 2, 5, 10) if size * power >= wanted * (1 - TINY))


def ticks(low: float, high: float, every: float) -> Iterator[tuple[float, str]]:
    """Multiples of `every` from `low` to `high`, and how to write them."""
    digits = max(0, -math.floor(math.log10(every) + TINY))
    for count in range(math.ceil(low / every - TINY), math.floor(high / every + TINY) + 1):
        yield count * every, f"{count * every:.{digits}f}"


def samples(rows: Sequence[Sample]) -> str:
    """Held-out prompts with the answers before and after."""
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "before", "after", "expected"))
    body = "".join(f"<tr>{''.join(map(cell, (row.prompt, row.before, row.after, row.expected)))}</tr>" for row in rows)
    return f'<h2>Held-out answers</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def cell(text: str | None) -> str:
    """A text as it was written, from the left or from the right as its first letter says."""
    return f'<td><pre dir="auto">{"-" if text is None else escape(text.strip())}</pre></td>'


def table(rows: Iterator[Fact]) -> str:
    """Two columns."""
    body = (
        f'<tr><td>{escape(row.label)}</td><td class="{"known" if row.known else "none"}">{escape(row.text)}</td></tr>'
        for row in rows
    )
    return f'<table class="facts">{"".join(body)}</table>'
