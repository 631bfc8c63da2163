"""The wish that a run ends early and in order."""

from __future__ import annotations

import asyncio

POLL_S = 0.2


class Stop:
    """Ends a run after the optimizer step under way, with everything that belongs to an end.

    `ask` may be called from any thread, and from the handler of a signal: it takes no lock and wakes nobody, so that
    who waits looks every now and then.

    Attributes:
        reason: why the run is to end, in words; None while nobody has asked.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Have the run end; the first reason stays."""
        if self.reason is None:
            self.reason = reason

    async def asked(self) -> None:
        """Wait until someone has asked."""
        while self.reason is None:
            await asyncio.sleep(POLL_S)
