"""Wall time of named phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Interval = tuple[str, float, float]


@dataclass(slots=True)
class Timings:
    """Seconds spent in each phase; a phase entered twice adds up, one that fails counts too.

    Attributes:
        clock: monotonic seconds.
        seconds: by phase.
        intervals: name, begin and end of every phase by the clock, in the order of their ends.
        began: when this was made, by the clock.
    """

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since this was made, whatever they were spent on."""
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
        """The intervals in seconds since the epoch, where it is `now`."""
        offset = now - self.clock()
        return [(name, start + offset, end + offset) for name, start, end in self.intervals]

    def metrics(self) -> dict[str, float]:
        """The phases as `time/NAME` in seconds."""
        return {f"time/{name}": value for name, value in self.seconds.items()}
