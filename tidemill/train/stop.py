"""The wish that a run ends early and in order."""

from __future__ import annotations

import asyncio

POLL_S = 0.2


class Stop:
    """Ends a run after the optimizer step under way, with everything that belongs to an end, or in a hurry.

    `ask` may be called from any thread, and from the handler of a signal: it takes no lock and wakes nobody, so that
    who waits looks every now and then.

    Attributes:
        reason: why the run is to end, in words; None while nobody has asked.
        hurry: whether a checkpoint is all that there is time for, and the engines may be gone already.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.hurry = False

    def ask(self, reason: str, *, hurry: bool = False) -> None:
        """Have the run end; the first reason stays, and who is in a hurry is heard in any case."""
        self.hurry = self.hurry or hurry
        if self.reason is None or hurry:
            self.reason = reason

    async def asked(self, *, hurry: bool = False) -> None:
        """Wait until someone has asked; with `hurry`, until someone is in a hurry."""
        while not self.hurry and (hurry or self.reason is None):
            await asyncio.sleep(POLL_S)
