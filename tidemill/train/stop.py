"""A request to end a run early."""

from __future__ import annotations

import asyncio

POLL_S = 0.2


class Stop:
    """Ends a run after the current optimizer step.

    A normal stop finishes the evaluation, publishes the last version and exports the model. An immediate stop writes a
    checkpoint only.

    `ask` may be called from any thread and from a signal handler: it takes no lock and notifies no waiter, so
    `asked` polls.

    Attributes:
        reason: why the run ends; None until a stop is requested.
        immediate: only a checkpoint is written, because the engines may already be gone.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.immediate = False

    def ask(self, reason: str, *, immediate: bool = False) -> None:
        """Request a stop. The first reason is kept, unless a later request is immediate."""
        self.immediate = self.immediate or immediate
        if self.reason is None or immediate:
            self.reason = reason

    async def asked(self, *, immediate: bool = False) -> None:
        """Wait until a stop is requested, or with `immediate` until an immediate one is."""
        while not self.immediate and (immediate or self.reason is None):
            await asyncio.sleep(POLL_S)
