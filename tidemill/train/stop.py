"""The wish that a run ends early and in order."""

from __future__ import annotations

import asyncio

POLL_S = 0.2


class Stop:
    """Ends a run after the current optimizer step: with a sync, a score and a model, or immediately.

    `ask` may be called from any thread, and from the handler of a signal: it takes no lock and wakes nobody, so that
    who waits looks every now and then.

    Attributes:
        reason: why the run is to end, in words; None while nobody has asked.
        immediate: whether there is time for a checkpoint only; the engines may be gone already.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.immediate = False

    def ask(self, reason: str, *, immediate: bool = False) -> None:
        """Ask the run to end; the first reason stays, but an immediate stop replaces it."""
        self.immediate = self.immediate or immediate
        if self.reason is None or immediate:
            self.reason = reason

    async def asked(self, *, immediate: bool = False) -> None:
        """Wait until a stop is asked for; with `immediate`, until an immediate one is."""
        while not self.immediate and (immediate or self.reason is None):
            await asyncio.sleep(POLL_S)
