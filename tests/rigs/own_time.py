"""An event loop whose clock advances only while all tasks wait: no deadline depends on the load of the machine."""

from __future__ import annotations

import asyncio
import selectors

TURN_S = 1e-5
"""Duration of one iteration of the loop, so that a task that only yields reaches its deadline too."""


class OwnTime(asyncio.SelectorEventLoop):
    """A loop with a clock of its own, which jumps to the next timer when no task is ready.

    For code in one thread and one process: work of another thread or process takes no time on this clock.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(Patient(self))

    def time(self) -> float:
        return self.now


class Patient(selectors.DefaultSelector):
    """Advances the clock of its loop instead of waiting."""

    def __init__(self, loop: OwnTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.now += TURN_S
        if timeout is None:  # there is no timer: only a file or a thread can wake the loop
            return super().select(None)
        found = super().select(0)
        self.loop.now += 0.0 if found else max(timeout, 0.0)
        return found


def own_time() -> float:
    """Monotonic seconds of the running loop, to be passed as a clock."""
    return asyncio.get_running_loop().time()
