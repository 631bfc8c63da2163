"""Charts as SVG, drawn with matplotlib, which is imported late because it is slow to import.

The same input always gives the same text: ids come from a fixed salt, and no date is stored.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tidemill.observe.events import Activity
from tidemill.observe.text import duration
from tidemill.observe.timeline import ADOPTION, PHASES, Load, adoptions, loads, overlap, phases, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Points = Sequence[tuple[int, float]]
"""(step, value), ordered by step."""
REWARD_COLOR, SCORE_COLOR, TEXT_COLOR, GRID_COLOR = "#2563c9", "#c25e00", "#5a6673", "#e3e8ee"
MOST_POINTS = 500
"""Of a line; more would hide the trend of a long run."""
COLUMNS = 1000
"""Parts of the time that the timeline distinguishes, so that the picture of a long run stays small."""
ADOPT_COLOR, ENGINE_COLOR = "#f2b880", "#58a68c"
TICKS, MOST_TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400), 8
"""Distances of ticks of the timeline, in seconds, and how many ticks fit."""


def timeline_svg(activities: Sequence[Activity]) -> str:
    """Phases of the trainer, adoptions of new versions, and groups in flight at every engine, over time."""
    with style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MultipleLocator

        (begin, end), engines = span(activities), loads(activities)
        figure = Figure(figsize=(11, 1.6 + 0.5 * len(engines)), layout="constrained")
        axes = figure.subplots()
        draw_trainer(axes, activities)
        most = max((load.requests for found in engines.values() for load in found), default=1)
        for row, found in enumerate(engines.values(), 1):
            floor, label = np.full(COLUMNS, row + 0.4), "groups in flight" if row == 1 else None
            draw_area(axes, end - begin, floor, 0.8 / most * means(found, begin, end), ENGINE_COLOR, label)
        axes.set_title(
            f"Steps {activities[0].step} to {activities[-1].step}: engines generate during {overlap(activities):.0%} "
            f"of the trainer's updates, with up to {most} groups in flight"
        )
        axes.set_yticks(range(len(engines) + 1), ["trainer", *engines])
        axes.set_ylim(len(engines) + 0.5, -0.5)  # from top to bottom
        axes.set_xlim(0, end - begin)
        axes.xaxis.set_major_locator(
            MultipleLocator(next((t for t in TICKS if (end - begin) / t <= MOST_TICKS), TICKS[-1]))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: duration(seconds)))
        figure.legend(loc="outside lower center", ncols=9, frameon=False, columnspacing=1.2, handlelength=1.2)
        return to_svg(figure)


def draw_trainer(axes: Axes, activities: Sequence[Activity]) -> None:
    """Row 0: phases, and adoptions below. Phases too many to be told apart are drawn as shares of the time."""
    (begin, end), found = span(activities), phases(activities)
    floor = np.full(COLUMNS, 0.2)
    for name, (label, color) in PHASES.items():
        times = [Load(phase.start, phase.end, 1) for phase in found if phase.name == name]
        if len(found) <= COLUMNS:
            bars = [(load.start - begin, load.end - load.start) for load in times]
            axes.broken_barh(bars, (-0.4, 0.6), facecolors=color, label=label)
        else:
            shares = 0.6 * means(times, begin, end)
            draw_area(axes, end - begin, floor, shares, color, label)
            floor = floor - shares
    strip = 0.15 * means(adoptions(activities), begin, end)
    draw_area(axes, end - begin, np.full(COLUMNS, 0.4), strip, ADOPT_COLOR, ADOPTION)


def draw_area(axes: Axes, seconds: float, floor: Floats, heights: Floats, color: str, label: str | None) -> None:
    """Fill from `floor` upwards, with one height in each of `COLUMNS` parts of the time."""
    both = np.stack([floor, floor - heights])
    changes = np.append(0, np.flatnonzero((np.diff(both) != 0).any(axis=0)) + 1)
    edges = np.append(changes, COLUMNS) * (seconds / COLUMNS)
    axes.stairs(both[1, changes], edges, baseline=both[0, changes], fill=True, color=color, label=label)


def means(found: Sequence[Load], begin: float, end: float) -> Floats:
    """Mean number of groups in flight in each of `COLUMNS` equal parts of the time."""
    sums, part = np.zeros(COLUMNS), (end - begin) / COLUMNS
    for load in found:
        first, last = (load.start - begin) / part, (load.end - begin) / part
        for column in range(math.floor(first), min(math.ceil(last), COLUMNS)):
            sums[column] += load.requests * (min(last, column + 1) - max(first, column))
    return sums


def reward_svg(rewards: Points, scores: Points) -> str:
    """Training rewards as a line and held-out scores as dots, over the steps of the trainer; at least one point."""
    with style():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(7.2, 2.6), layout="constrained", facecolor="none")
        axes = figure.subplots(subplot_kw={"facecolor": "none"})
        line = "-" if len(rewards) > 1 else "o"  # a line needs two points
        for points, form, color in ((rewards, line, REWARD_COLOR), (scores, "o", SCORE_COLOR)):
            if points:
                axes.plot(*zip(*points, strict=True), form, color=color, clip_on=False)
        axes.grid(axis="y", color=GRID_COLOR)
        axes.tick_params(colors=TEXT_COLOR, length=0)
        axes.xaxis.label.set_color(TEXT_COLOR)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step of the trainer")
        return to_svg(figure)


def thinned(points: Points) -> tuple[Points, int]:
    """At most `MOST_POINTS`: each is the mean of so many points, at the last of their steps; and that number."""
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts], size


def style() -> AbstractContextManager[None]:
    """Texts stay text, and ids are the same in every process."""
    import matplotlib as mpl

    return mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "tidemill", "font.size": 9, "font.sans-serif": ["DejaVu Sans"]}
    )


def to_svg(figure: Figure) -> str:
    """The `svg` element, without the XML header, so that it can be a part of an HTML page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
