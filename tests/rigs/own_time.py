"""An event loop whose time passes only while everybody waits: no deadline depends on how busy the machine is."""

from __future__ import annotations

import asyncio
import selectors

TURN_S = 1e-5
"""What one turn of the loop takes, so that who only yields comes to a deadline too."""


class OwnTime(asyncio.SelectorEventLoop):
    """A loop whose clock is its own: it goes to the next timer at once when nothing else is to be done.

    For code of one thread and one process: what a thread or a process does meanwhile takes no time here.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(Patient(self))

    def time(self) -> float:
        return self.now


class Patient(selectors.DefaultSelector):
    """Lets the time of its loop pass instead of waiting."""

    def __init__(self, loop: OwnTime) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.now += TURN_S
        if timeout is None:  # nobody has a timer: only a file or a thread can go on
            return super().select(None)
        found = super().select(0)
        self.loop.now += 0.0 if found else max(timeout, 0.0)
        return found


def own_time() -> float:
    """Monotonic seconds of the loop that runs, for what is given a clock."""
    return asyncio.get_running_loop().time()
