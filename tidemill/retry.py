"""The policy for retries and waits of synchronous code. Every wait has a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type, retry_if_not_result, wait_fixed

OUTAGE_S = 900.0
"""How long a service around a run may be unreachable before a step of the pipeline fails, in seconds."""

T = TypeVar("T")


def retrying(
    errors: type[BaseException] | tuple[type[BaseException], ...],
    limit_s: float,
    every_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    before_sleep: Callable[[RetryCallState], None] | None = None,
) -> Retrying:
    """Repeat a call while it raises one of `errors`, for `limit_s` seconds; then raise its last error.

    Example: `retrying(StoreError, 60.0, 1.0)(store.get_bytes, key)`.

    Args:
        errors: all others are raised at once.
        limit_s: after this time a failure is final, in seconds.
        every_s: between a failure and the next call, in seconds.
        now: clock; with `sleep` an argument, so that tests need no real time.
        sleep: waits.
        before_sleep: is called after each failure that is followed by another call.
    """
    policy = within(limit_s, every_s, now, sleep)
    return Retrying(retry=retry_if_exception_type(errors), before_sleep=before_sleep, reraise=True, **policy)


def wait_for(
    ready: Callable[[], T],
    limit_s: float,
    every_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `ready` until its result is true, for `limit_s` seconds; returns the last result.

    An error of `ready` ends the wait. The other arguments are those of `retrying`.
    """
    try:
        return Retrying(retry=retry_if_not_result(bool), **within(limit_s, every_s, now, sleep))(ready)
    except RetryError as error:
        last: T = error.last_attempt.result()
        return last


def within(limit_s: float, every_s: float, now: Callable[[], float], sleep: Callable[[float], None]) -> dict[str, Any]:
    """Arguments of `Retrying` for calls at fixed intervals up to a deadline."""
    deadline = now() + limit_s
    return {"wait": wait_fixed(every_s), "stop": lambda _: now() >= deadline, "sleep": sleep}
