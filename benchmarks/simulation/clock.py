"""Virtual time for asyncio: hours pass as fast as the events in them are handled."""

from __future__ import annotations

import asyncio
import selectors


class VirtualSelector(selectors.SelectSelector):
    """Passes the time that the loop would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another: the simulated run is stuck")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when nothing is left to do; deterministic."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def now() -> float:
    return asyncio.get_running_loop().time()
