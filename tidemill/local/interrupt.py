"""Signals to stop: they end what may be ended and leave alone what must be finished."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the body a termination or a lost terminal raises KeyboardInterrupt, as Ctrl-C does.

    Only the first: a second one could end the cleaning up before it has begun, or the exit after it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        before.clear()
        for every in SIGNALS:
            signal.signal(every, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within the body signals to stop are ignored: it is what they ask for, and it is bounded in time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
