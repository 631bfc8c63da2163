"""The events of a run, as a log that the driver writes and others may follow while it grows.

The log is JSON lines: one event per line, flushed at once. A line is complete once it ends with a newline.
"""

from __future__ import annotations

import json
import threading
import time as clock
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tidemill.errors import DataError

POLL_S = 0.2
STEPS = ("validate", "provision", "train", "evaluate", "register")
"""The steps of a pipeline that are timed, in their order."""
BLOCK = 1 << 20
"""Bytes per read."""


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """The run enters a phase such as "start engines" or "evaluate".

    Attributes:
        name: shown to people.
        time: seconds since the epoch, by default now; the same in all events.
    """

    kind: ClassVar[str] = "phase_started"
    name: str
    time: float = field(default_factory=clock.time)


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The trainer finished a step.

    Attributes:
        step: counted from 1.
        steps: of the whole run.
        version: policy version after the step.
        seconds: wall time of the step.
        metrics: by the names of `docs/metrics.md`.
    """

    kind: ClassVar[str] = "step_finished"
    step: int
    steps: int
    version: int
    seconds: float
    metrics: Mapping[str, float]
    time: float = field(default_factory=clock.time)


@dataclass(frozen=True, slots=True)
class Activity:
    """What the trainer and the engines did during a step; times are seconds since the epoch.

    Attributes:
        step: counted from 1.
        phases: name, begin and end of every phase of the trainer, and of every `adopt`, in which engines adopt a
            version concurrently.
        loads: by engine, the changes of the number of groups in flight: time and new number.
        attempt: begin of the attempt, which identifies it: a run that was interrupted right after a checkpoint
            continues with the next step, so step numbers do not tell attempts apart.
    """

    kind: ClassVar[str] = "activity"
    step: int
    phases: Sequence[Sequence[Any]]
    loads: Mapping[str, Sequence[Sequence[float]]]
    attempt: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationFinished:
    """A policy was scored on the held-out prompts.

    Attributes:
        step: optimizer steps of the policy, 0 for the initial one.
        score: mean reward.
        answers: `protocols.Answer` as mappings, one per prompt in the order of the data.
    """

    kind: ClassVar[str] = "evaluation_finished"
    step: int
    score: float
    answers: Sequence[Mapping[str, Any]]
    time: float = field(default_factory=clock.time)


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that does not end the run, for example about quarantined prompts or drops."""

    kind: ClassVar[str] = "warning"
    text: str


@dataclass(frozen=True, slots=True)
class PhaseFailed:
    """A phase failed; the same phase may start again as a retry.

    Attributes:
        name: of the phase.
        error: the message; the traceback is in the run's `failure.json` and `log.txt`.
    """

    kind: ClassVar[str] = "phase_failed"
    name: str
    error: str
    time: float = field(default_factory=clock.time)


Event = PhaseStarted | StepFinished | Activity | EvaluationFinished | Notice | PhaseFailed
KINDS: Mapping[str, type[Event]] = {
    event.kind: event for event in (PhaseStarted, StepFinished, Activity, EvaluationFinished, Notice, PhaseFailed)
}


def event_to_dict(event: Event) -> dict[str, Any]:
    """A JSON value; numpy numbers become Python numbers."""
    fields = asdict(event)
    if isinstance(event, StepFinished):
        fields["metrics"] = {name: float(value) for name, value in event.metrics.items()}
    return {"kind": event.kind, **fields}


def event_from_dict(value: object) -> Event:
    """The inverse of `event_to_dict`.

    Raises:
        DataError: an unknown kind, or fields that do not belong to it.
    """
    if not isinstance(value, dict) or value.get("kind") not in KINDS:
        raise DataError(f"not an event of a run: {str(value)[:200]}; known kinds are {sorted(KINDS)}")
    fields = {name: content for name, content in value.items() if name != "kind"}
    try:
        return KINDS[value["kind"]](**fields)
    except TypeError as error:
        raise DataError(f"not a {value['kind']} event: {error}") from error


def parse_line(path: Path, number: int, line: bytes) -> Event:
    """One line of a log; a broken one, for example of a killed writer, becomes a warning."""
    try:
        return event_from_dict(json.loads(line))
    except (DataError, ValueError) as error:
        return Notice(f"{path}: line {number} is skipped: {error}")


class EventLog:
    """Appends events to a file; a restarted run continues the same file."""

    def __init__(self, path: str | Path) -> None:
        """Open for appending, and end an incomplete last line, so that it does not break the next one."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("ab+", buffering=0)
        if not ends_with_newline(self.path):
            self.file.write(b"\n")

    def write(self, event: Event) -> None:
        """Append one event; readers see it after this call."""
        self.file.write(json.dumps(event_to_dict(event), ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ends_with_newline(path: Path) -> bool:
    """Whether the last line is complete; true for an empty file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"


def past_events(path: str | Path) -> Iterator[Event]:
    """The events of a log so far; none if the file does not exist yet."""
    stop = threading.Event()
    stop.set()
    return follow(path, stop)


def read_events(path: str | Path) -> list[Event]:
    """`past_events` as a list, which takes much memory for a long run."""
    return list(past_events(path))


def follow(path: str | Path, stop: threading.Event) -> Iterator[Event]:
    """Events of a log as they are written, from its beginning; waits for the file if necessary.

    The iterator ends when `stop` is set and everything written before is read. It does not end at `PhaseFailed`,
    because a retry continues the same file. An incomplete last line is read once it is complete.
    """
    path = Path(path)
    while not path.exists():
        if stop.wait(POLL_S):
            break
    if not path.exists():
        return
    with path.open("rb") as file:
        number, rest = 0, b""
        while True:
            stopped = stop.is_set()  # before the read, so that nothing written before `stop` is missed
            while block := file.read(BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    number += 1
                    if line:
                        yield parse_line(path, number, line)
            if stopped:
                return
            stop.wait(POLL_S)


def step_seconds(events: Iterable[Event], now: float) -> list[dict[str, float]]:
    """Seconds of each step of the pipeline, by launch of the pipeline, oldest first; the tries of a step are summed.

    A step lasts until the next one. If a step or an earlier one starts again, the time since the last event before does
    not count: the run was not at work. `tidemill train` writes `train` only.

    Args:
        events: of the folder of a run.
        now: end of the newest step.
    """
    launches: list[dict[str, float]] = []
    name, start, last = "", 0.0, 0.0

    def end(at: float) -> None:
        if name:
            launches[-1][name] = launches[-1].get(name, 0.0) + at - start

    for event in events:
        if isinstance(event, Activity | Notice):
            continue  # they have no time
        if isinstance(event, PhaseStarted) and event.name in STEPS:
            repeated = name != "" and STEPS.index(event.name) <= STEPS.index(name)
            end(last if repeated else event.time)
            if not name or event.name == STEPS[0] or (repeated and event.name != name):
                launches.append({})
            name, start = event.name, event.time
        last = event.time
    end(now)
    return launches
