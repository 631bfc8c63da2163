"""When trainer and engines were at work, as a picture or as a trace.

    trainer    ░░░▓▓▓▓▓▓▓▓▓▒░▓▓▓▓▓▓▓▓▒     waits, updates, syncs, ...
                            ▀▀▀      ▀▀▀   engines adopt a version
    engine 0   ▂▅▇▇▅▇▇▇▅▇▇▇▇▇▇▅▇▇▇▇▇▇▅     requests in flight

Both are made of the `Activity` events that a run writes after every step. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from tidemill.errors import DataError
from tidemill.observe.events import Activity, Event
from tidemill.observe.text import duration

# Phases of the trainer that do not overlap, and how they are drawn; those inside another one are left out.
COLORS: Mapping[str, str] = {
    "get_groups": "#d9d9d9",
    "advantages": "#1b9e77",
    "pack": "#66a61e",
    "update_actor": "#3b6fb6",
    "sync": "#e6842a",
    "evaluate": "#7a52a1",
    "checkpoint": "#b5485d",
}
ADOPT = "adopt"
ADOPT_COLOR = "#f2b880"
LABELS = {"get_groups": "wait for groups", "update_actor": "update", "sync": "sync weights"}
ENGINE_COLOR = "#58a68c"
WIDTH, LEFT, TOP, GAP = 1100, 90, 52, 10
COLUMNS = WIDTH - LEFT - GAP
"""One for each unit of width: what is finer cannot be seen, and the picture stays small however long the run was."""
TRAINER_HEIGHT, ADOPT_HEIGHT, ENGINE_HEIGHT = 30, 6, 46
TICKS = 8
IN_SECONDS = 120
"""From here on the axis has minutes and hours."""
NICE = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the trainer."""

    name: str
    start: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """A time through which an engine has so many requests in flight."""

    start: float
    end: float
    requests: int


def newest_attempt(events: Iterable[Event]) -> list[Activity]:
    """What the run did since it last started or was resumed; none if no step has finished."""
    attempt: list[Activity] = []
    for event in events:
        if isinstance(event, Activity):
            if attempt and event.attempt != attempt[-1].attempt:
                attempt = []
            attempt.append(event)
    return attempt


def last_steps(activities: Sequence[Activity], count: int | None) -> list[Activity]:
    """The newest steps of an attempt, all of them for None; the first one says what was in flight when it began.

    Raises:
        DataError: there are none.
    """
    if not activities:
        raise DataError("the run has finished no step yet, so that there is nothing to draw")
    kept = list(activities if count is None else activities[-count:])
    before = {name: part[-1] for activity in activities[: -len(kept)] for name, part in activity.loads.items() if part}
    began = {name: [change, *kept[0].loads.get(name, [])] for name, change in before.items()}
    return [replace(kept[0], loads={**kept[0].loads, **began}), *kept[1:]]


def phases(activities: Sequence[Activity]) -> list[Phase]:
    """What the trainer did, in order."""
    return [
        Phase(name, start, end, activity.step)
        for activity in activities
        for name, start, end in activity.phases
        if name in COLORS
    ]


def adoptions(activities: Sequence[Activity]) -> list[Load]:
    """When engines adopted a version beside the trainer, between the first step and the end."""
    begin, end = span(activities)
    times = [(s, e) for activity in activities for name, s, e in activity.phases if name == ADOPT]
    return [Load(max(s, begin), min(e, end), 1) for s, e in times if min(e, end) > max(s, begin)]


def loads(activities: Sequence[Activity]) -> dict[str, list[Load]]:
    """What every engine had in flight, by name in the order of their numbers, from the first step to the end."""
    begin, end = span(activities)
    changes: dict[str, list[tuple[float, int]]] = {}
    for activity in activities:
        for engine, part in activity.loads.items():
            changes.setdefault(engine, []).extend((time, int(requests)) for time, requests in part)
    ordered = sorted(changes.items(), key=lambda item: [part.zfill(9) for part in re.split(r"(\d+)", item[0])])
    return {engine: list(constant(sorted(points), begin, end)) for engine, points in ordered}


def constant(points: Sequence[tuple[float, int]], begin: float, end: float) -> Iterator[Load]:
    """The times between changes in which anything is in flight."""
    for (start, requests), (stop, _) in zip(points, [*points[1:], (end, 0)], strict=True):
        if requests and min(stop, end) > max(start, begin):
            yield Load(max(start, begin), min(stop, end), requests)


def span(activities: Sequence[Activity]) -> tuple[float, float]:
    """First and last moment of the trainer, at least a millisecond apart."""
    times = [phase for activity in activities for phase in activity.phases if phase[0] != ADOPT]
    begin = min(start for _, start, _ in times)
    return begin, max(begin + 1e-3, *(end for _, _, end in times))


def overlap(activities: Sequence[Activity]) -> float:
    """Share of the trainer's updates during which at least one engine was generating; 0 without any update."""
    return overlap_of(phases(activities), loads(activities))


def overlap_of(done: Sequence[Phase], engines: Mapping[str, Sequence[Load]]) -> float:
    """See `overlap`."""
    busy = union([(load.start, load.end) for engine in engines.values() for load in engine])
    updates = [(phase.start, phase.end) for phase in done if phase.name == "update_actor"]
    total = sum(end - start for start, end in updates)
    return common(updates, busy) / total if total else 0.0


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Seconds that both cover; the intervals of each are in order and apart."""
    seconds, one, two = 0.0, 0, 0
    while one < len(first) and two < len(second):
        (start, end), (begin, stop) = first[one], second[two]
        seconds += max(0.0, min(end, stop) - max(start, begin))
        one, two = (one + 1, two) if end < stop else (one, two + 1)
    return seconds


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals without overlaps that cover the same times."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def svg(activities: Sequence[Activity]) -> str:
    """A picture, to be looked at in a browser or in MLflow; at most some 200 kB and 15 kB an engine."""
    begin, end = span(activities)
    done, engines = phases(activities), loads(activities)
    height = TOP + TRAINER_HEIGHT + len(engines) * (ENGINE_HEIGHT + GAP) + 3 * GAP
    title = f"Steps {activities[0].step} to {activities[-1].step}: engines generate during "
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" shape-rendering="crispEdges">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 16, f"{title}{overlap_of(done, engines):.0%} of the trainer's updates", size=14),
        *legend(),
        text(6, TOP + 20, "trainer"),
        *trainer_row(done, begin, end),
        *adopt_row(adoptions(activities), begin, end),
        *engine_rows(engines, begin, end),
        *axis(end - begin, height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start") -> str:
    """Words in the picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def legend() -> Iterator[str]:
    """What the colours mean."""
    x, drawn = LEFT, {LABELS.get(name, name): color for name, color in COLORS.items()}
    for words, color in {**drawn, "engines adopt": ADOPT_COLOR, "groups in flight": ENGINE_COLOR}.items():
        yield f'<rect x="{x}" y="28" width="12" height="12" fill="{color}"/>'
        yield text(x + 16, 38, words)
        x += 32 + 7 * len(words)


def trainer_row(done: Sequence[Phase], begin: float, end: float) -> Iterator[str]:
    """The phases one after the other; where there are too many to be told apart, what share of the time each took."""
    if len(done) <= COLUMNS:
        yield from (bar(phase, begin, COLUMNS / (end - begin)) for phase in done)
        return
    floor = [float(TOP + TRAINER_HEIGHT)] * COLUMNS
    for name, color in COLORS.items():
        times = [Load(phase.start, phase.end, 1) for phase in done if phase.name == name]
        top = [low - TRAINER_HEIGHT * share for low, share in zip(floor, means(times, begin, end), strict=True)]
        if times:
            yield area(floor, top, color)
        floor = top


def bar(phase: Phase, begin: float, scale: float) -> str:
    """A phase of the trainer; its name and length show under the pointer."""
    x, width = LEFT + (phase.start - begin) * scale, (phase.end - phase.start) * scale
    return (
        f'<rect x="{x:.2f}" y="{TOP}" width="{max(width, 0.2):.2f}" height="{TRAINER_HEIGHT}" '
        f'fill="{COLORS[phase.name]}"><title>step {phase.step}: {phase.name} {phase.end - phase.start:.2f} s</title>'
        "</rect>"
    )


def adopt_row(times: Sequence[Load], begin: float, end: float) -> Iterator[str]:
    """A strip below the trainer."""
    floor = float(TOP + TRAINER_HEIGHT + ADOPT_HEIGHT + 1)
    if times:
        top = [floor - ADOPT_HEIGHT * share for share in means(times, begin, end)]
        yield area([floor] * COLUMNS, top, ADOPT_COLOR)


def engine_rows(engines: Mapping[str, Sequence[Load]], begin: float, end: float) -> Iterator[str]:
    """Requests in flight as an area, to the scale of the busiest engine."""
    most = max((load.requests for engine in engines.values() for load in engine), default=1)
    for row, (engine, times) in enumerate(engines.items()):
        floor = float(TOP + TRAINER_HEIGHT + (row + 1) * (ENGINE_HEIGHT + GAP))
        yield text(6, floor - ENGINE_HEIGHT / 2 + 4, engine)
        yield text(LEFT - 6, floor - ENGINE_HEIGHT + 10, str(most), size=10, anchor="end")
        top = [floor - ENGINE_HEIGHT * mean / most for mean in means(times, begin, end)]
        yield area([floor] * COLUMNS, top, ENGINE_COLOR)


def means(times: Iterable[Load], begin: float, end: float) -> list[float]:
    """Mean number of requests in flight in each of `COLUMNS` equal parts of the time."""
    found, part = [0.0] * COLUMNS, (end - begin) / COLUMNS
    for load in times:
        first, last = (load.start - begin) / part, (load.end - begin) / part
        for column in range(math.floor(first), min(math.ceil(last), COLUMNS)):
            found[column] += load.requests * (min(last, column + 1) - max(first, column))
    return found


def area(floor: Sequence[float], top: Sequence[float], color: str) -> str:
    """What lies between two outlines that have one height in every column."""
    low, high = ([f"{height:.1f}" for height in heights] for heights in (floor, top))
    there = (f"H{LEFT + n}V{high[n]}" for n in range(1, COLUMNS) if high[n] != high[n - 1])
    back = (f"H{LEFT + n}V{low[n - 1]}" for n in range(COLUMNS - 1, 0, -1) if low[n] != low[n - 1])
    path = "".join([f"M{LEFT},{high[0]}", *there, f"H{LEFT + COLUMNS}V{low[-1]}", *back, f"H{LEFT}Z"])
    return f'<path d="{path}" fill="{color}"/>'


def axis(seconds: float, height: int) -> Iterator[str]:
    """Ticks at round times since the first step."""
    every = next((nice for nice in NICE if seconds / nice <= TICKS), NICE[-1])
    for tick in range(0, int(seconds) + 1, every):
        x = LEFT + tick * COLUMNS / seconds
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 20}" stroke="#999" stroke-width="0.5"/>'
        yield text(x, height - 6, f"{tick} s" if seconds < IN_SECONDS else duration(tick), size=10, anchor="middle")


def trace(activities: Sequence[Activity]) -> str:
    """The Trace Event Format of Chrome, which ui.perfetto.dev opens; times in microseconds."""
    begin, _ = span(activities)
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "adoption"}},
    ]
    for load in adoptions(activities):
        times = {"ts": micro(load.start - begin), "dur": micro(load.end - load.start)}
        rows.append({"ph": "X", "name": "engines adopt", "pid": 1, "tid": 2, **times})
    for phase in phases(activities):
        times = {"ts": micro(phase.start - begin), "dur": micro(phase.end - phase.start)}
        rows.append({"ph": "X", "name": phase.name, "pid": 1, "tid": 1, **times, "args": {"step": phase.step}})
    for engine, changes in loads(activities).items():
        for load in changes:
            for time, requests in ((load.start, load.requests), (load.end, 0)):
                rows.append(
                    {"ph": "C", "name": engine, "pid": 1, "ts": micro(time - begin), "args": {"in flight": requests}}
                )
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n"


def micro(seconds: float) -> float:
    """Microseconds, with three digits behind the point."""
    return round(seconds * 1e6, 3)
