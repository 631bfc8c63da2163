"""Wall time of phases, and peak memory of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import psutil

Interval = tuple[str, float, float]


@dataclass(slots=True)
class Timings:
    """Seconds spent in named phases; repeated phases add up, and a phase that fails counts too.

    Attributes:
        clock: monotonic seconds.
        seconds: by phase.
        intervals: name, begin and end of every phase by the clock, in the order of their ends.
        began: creation of this object, by the clock.
    """

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since this object was created."""
        return self.clock() - self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        start = self.clock()
        try:
            yield
        finally:
            end = self.clock()
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start
            self.intervals.append((name, start, end))

    def dated(self, now: float) -> list[Interval]:
        """The intervals in seconds since the epoch, given the current time `now`."""
        offset = now - self.clock()
        return [(name, start + offset, end + offset) for name, start, end in self.intervals]

    def metrics(self) -> dict[str, float]:
        """The phases as `time/NAME`, in seconds."""
        return {f"time/{name}": value for name, value in self.seconds.items()}


class MemoryMeter:
    """Samples the memory of this process and all its descendants in a thread; shared pages count once (PSS).

    A context manager; `peak_bytes` is the largest sum.
    """

    def __init__(self, period_s: float = 5.0) -> None:
        self.peak_bytes = 0
        self.period_s = period_s
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.sample_until_stopped, name="memory-meter", daemon=True)

    def __enter__(self) -> MemoryMeter:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self.thread.join(timeout=self.period_s)
        self.peak_bytes = max(self.peak_bytes, tree_bytes())

    def sample_until_stopped(self) -> None:
        while not self.stopped.wait(self.period_s):
            self.peak_bytes = max(self.peak_bytes, tree_bytes())


def tree_bytes() -> int:
    """Proportional set size of this process and its descendants, in bytes; processes that have just ended count 0."""
    root = psutil.Process()
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total
