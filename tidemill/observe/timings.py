"""Wall time of named phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Seconds spent in each phase; a phase entered twice adds up, one that fails counts too."""

    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - start

    def metrics(self) -> dict[str, float]:
        """The phases as `time/NAME` in seconds."""
        return {f"time/{name}": value for name, value in self.seconds.items()}
