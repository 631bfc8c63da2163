"""The one policy for retries and waits: how long a run is patient with the services around it, and how it waits.

Every wait has a deadline. Clock and sleep are arguments, so that tests need no real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, retry_if_not_result, wait_fixed

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
    """Repeat a call while it raises one of `errors`, for `limit_s` seconds; then its last error is raised.

    Example: `retrying(StoreError, 60.0, 1.0)(store.get_bytes, key)`.
    """
    deadline = now() + limit_s
    return Retrying(
        retry=retry_if_exception_type(errors),
        wait=wait_fixed(every_s),
        stop=lambda _: now() >= deadline,
        sleep=sleep,
        before_sleep=before_sleep,
        reraise=True,
    )


def wait_for(
    ready: Callable[[], T],
    limit_s: float,
    every_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `ready` until it returns something true, for `limit_s` seconds; returns its last value."""
    deadline = now() + limit_s
    polling = Retrying(
        retry=retry_if_not_result(bool),
        wait=wait_fixed(every_s),
        stop=lambda _: now() >= deadline,
        sleep=sleep,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else ready(),
    )
    return polling(ready)
