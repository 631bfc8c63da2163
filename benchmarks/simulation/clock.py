"""Virtual time for asyncio: the clock jumps from event to event."""

from __future__ import annotations

import asyncio
import selectors


class VirtualSelector(selectors.SelectSelector):
    """Advances the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulated run is stuck: no timer is left and every task waits for another")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances only when no task is ready; deterministic."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def now() -> float:
    return asyncio.get_running_loop().time()
