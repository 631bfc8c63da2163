"""When the trainer and the engines were working, from the `Activity` events of a run.

    trainer    ░░░▓▓▓▓▓▓▓▓▓▒░▓▓▓▓▓▓▓▓▒     waits, updates, syncs, ...
                            ▀▀▀      ▀▀▀   engines adopt a version
    engine 0   ▂▅▇▇▅▇▇▇▅▇▇▇▇▇▇▅▇▇▇▇▇▇▅     groups in flight

`trace` has every interval, for ui.perfetto.dev; `charts.timeline_svg` draws the picture. Times are in seconds since the
epoch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemill.errors import DataError
from tidemill.observe.events import Activity, Event

PHASES: Mapping[str, tuple[str, str]] = {
    "get_groups": ("wait for groups", "#d9d9d9"),
    "advantages": ("advantages", "#1b9e77"),
    "pack": ("pack", "#66a61e"),
    "update_actor": ("update", "#3b6fb6"),
    "sync": ("sync weights", "#e6842a"),
    "evaluate": ("evaluate", "#7a52a1"),
    "checkpoint": ("checkpoint", "#b5485d"),
}
"""Phases of the trainer that do not overlap, with label and colour; phases within another one are left out."""
ADOPT, ADOPTION = "adopt", "engines adopt"
"""Name of the phase in which engines adopt a version, and its label."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the trainer."""

    name: str
    start: float
    end: float
    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """An interval in which an engine has a constant number of groups in flight."""

    start: float
    end: float
    requests: int


def newest_attempt(events: Iterable[Event]) -> list[Activity]:
    """The activities since the run last started or resumed; empty if no step has finished."""
    attempt: list[Activity] = []
    for event in events:
        if isinstance(event, Activity):
            if attempt and event.attempt != attempt[-1].attempt:
                attempt = []
            attempt.append(event)
    return attempt


def last_steps(activities: Sequence[Activity], count: int | None) -> list[Activity]:
    """The newest `count` steps of an attempt (None: all); the first one has the groups in flight at its beginning.

    Raises:
        DataError: no step has finished.
    """
    if not activities:
        raise DataError("the run has not finished a step yet. Draw the timeline after the first step.")
    kept = list(activities if count is None else activities[-count:])
    before = {name: part[-1] for activity in activities[: -len(kept)] for name, part in activity.loads.items() if part}
    began = {name: [change, *kept[0].loads.get(name, [])] for name, change in before.items()}
    return [replace(kept[0], loads={**kept[0].loads, **began}), *kept[1:]]


def phases(activities: Sequence[Activity]) -> list[Phase]:
    """The trainer's phases, in order."""
    return [
        Phase(name, start, end, activity.step)
        for activity in activities
        for name, start, end in activity.phases
        if name in PHASES
    ]


def adoptions(activities: Sequence[Activity]) -> list[Load]:
    """When engines adopted a version, clipped to the time of the trainer; `requests` is 1."""
    begin, end = span(activities)
    times = [(s, e) for activity in activities for name, s, e in activity.phases if name == ADOPT]
    return [Load(max(s, begin), min(e, end), 1) for s, e in times if min(e, end) > max(s, begin)]


def loads(activities: Sequence[Activity]) -> dict[str, list[Load]]:
    """Groups in flight by engine, clipped to the time of the trainer; engines are ordered by number."""
    begin, end = span(activities)
    changes: dict[str, list[tuple[float, int]]] = {}
    for activity in activities:
        for engine, part in activity.loads.items():
            changes.setdefault(engine, []).extend((time, int(requests)) for time, requests in part)
    ordered = sorted(changes.items(), key=lambda item: [part.zfill(9) for part in re.split(r"(\d+)", item[0])])
    return {engine: list(constant(sorted(points), begin, end)) for engine, points in ordered}


def constant(points: Sequence[tuple[float, int]], begin: float, end: float) -> Iterator[Load]:
    """The intervals between changes, without those in which nothing is in flight."""
    for (start, requests), (stop, _) in zip(points, [*points[1:], (end, 0)], strict=True):
        if requests and min(stop, end) > max(start, begin):
            yield Load(max(start, begin), min(stop, end), requests)


def span(activities: Sequence[Activity]) -> tuple[float, float]:
    """Begin and end of the trainer's phases, at least a millisecond apart."""
    times = [phase for activity in activities for phase in activity.phases if phase[0] != ADOPT]
    begin = min(start for _, start, _ in times)
    return begin, max(begin + 1e-3, *(end for _, _, end in times))


def overlap(activities: Sequence[Activity]) -> float:
    """Share of the trainer's updates during which at least one engine was generating; 0 without any update."""
    busy = union([(load.start, load.end) for engine in loads(activities).values() for load in engine])
    updates = [(phase.start, phase.end) for phase in phases(activities) if phase.name == "update_actor"]
    total = sum(end - start for start, end in updates)
    return common(updates, busy) / total if total else 0.0


def common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Seconds that both cover; each has sorted, disjoint intervals."""
    seconds, one, two = 0.0, 0, 0
    while one < len(first) and two < len(second):
        (start, end), (begin, stop) = first[one], second[two]
        seconds += max(0.0, min(end, stop) - max(start, begin))
        one, two = (one + 1, two) if end < stop else (one, two + 1)
    return seconds


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, disjoint intervals that cover the same times."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def trace(activities: Sequence[Activity]) -> str:
    """JSON in Chrome's Trace Event Format, which ui.perfetto.dev opens; times are microseconds since the first step."""
    begin, _ = span(activities)
    rows: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "adoption"}},
    ]
    for load in adoptions(activities):
        times = {"ts": micro(load.start - begin), "dur": micro(load.end - load.start)}
        rows.append({"ph": "X", "name": ADOPTION, "pid": 1, "tid": 2, **times})
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
    return round(seconds * 1e6, 3)
