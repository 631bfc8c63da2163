"""The rule for adding or retiring an engine. Pure arithmetic.

With n engines a version takes as long as the slower side. The trainer waits for groups for a share t of this time. For
a share r generation is idle, because it is as far ahead as it may be. So generation is busy for the share 1 - r, and
with one engine less it would be busy for (1 - r) n / (n - 1).

grow: t >= `GROW_AT`, because the trainer waits.
shrink: (1 - r) n / (n - 1) <= `HEADROOM`, so that generation does not become the slower side.

A condition must hold for `VERSIONS` versions in a row. Under a steady load the number of engines does not oscillate:
if n - 1 engines made the trainer wait for t >= 0.2, then generation with n engines is busy for at least
(n - 1) / (0.8 n) of the time, and an engine is retired only if it is busy for at most 0.9 (n - 1) / n.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

GROW_AT = 0.2
HEADROOM = 0.9
VERSIONS = 3


@dataclass(slots=True)
class Elasticity:
    """Decides from the metrics of the steps.

    Attributes:
        smallest, largest: engines that a run may have.
    """

    smallest: int
    largest: int
    _seconds: float = 0.0
    _waited: float = 0.0
    _idle: float = 0.0
    _versions: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=VERSIONS))

    def step(self, seconds: float, trainer_idle: float, rollouter_idle: float) -> None:
        self._seconds += seconds
        self._waited += seconds * trainer_idle
        self._idle += seconds * rollouter_idle

    def version(self, engines: int) -> int:
        """End a version that `engines` engines generated; returns 1 to add an engine, -1 to retire one, else 0."""
        if self._seconds > 0:
            self._versions.append((self._waited / self._seconds, self._idle / self._seconds))
        self._seconds = self._waited = self._idle = 0.0
        change = self._change(engines) if len(self._versions) == VERSIONS else 0
        if change:
            self.forget()
        return change

    def forget(self) -> None:
        """Start measuring again, because the fleet has changed."""
        self._seconds = self._waited = self._idle = 0.0
        self._versions.clear()

    def _change(self, engines: int) -> int:
        if engines < self.largest and all(waited >= GROW_AT for waited, _ in self._versions):
            return 1
        spare = engines > self.smallest and all(
            (1 - idle) * engines <= HEADROOM * (engines - 1) for _, idle in self._versions
        )
        return -1 if spare else 0
