"""Further tries of a step in its own pod.

On a stock KFP, Argo restarts a step whose pod was lost, but not a step that failed: KFP's `set_retry` compiles without
a policy, and Argo's ConfigMap adds `retryPolicy: OnError`. In KFP's local runner `set_retry` does it all.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential

from tidemill.errors import TidemillError, is_retryable
from tidemill.kuberay.run_status import this_kfp_run

TRIES = 4
LIMIT_S = 1800.0
"""Seconds after which no further try starts; a pod has an hour."""
BACKOFF = wait_exponential(multiplier=5.0, exp_base=4.0, max=300.0)
"""5, 20, 80, 300, 300 ... seconds, as `set_retry`."""

P = ParamSpec("P")
R = TypeVar("R")


def retried(
    step: Callable[P, R],
    *,
    tries: int | None = TRIES,
    limit_s: float | None = LIMIT_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[P, R]:
    """The step with further tries after an error that may pass; unchanged outside of a cluster.

    Args:
        step: continues from what an earlier try left.
        tries: at most, None for any number.
        limit_s: seconds after which no further try starts, None for never.
        now: clock.
        sleep: waits.
    """

    @functools.wraps(step)
    def with_retries(*args: P.args, **kwargs: P.kwargs) -> R:
        if this_kfp_run() is None:
            return step(*args, **kwargs)
        begun = now()

        def is_last(state: RetryCallState) -> bool:
            too_many = tries is not None and state.attempt_number >= tries
            return too_many or (limit_s is not None and now() - begun >= limit_s)

        policy = Retrying(
            retry=retry_if_exception(may_pass),
            stop=is_last,
            wait=BACKOFF,
            sleep=sleep,
            before_sleep=report,
            reraise=True,
        )
        return policy(step, *args, **kwargs)

    return with_retries


def may_pass(error: BaseException) -> bool:
    """Whether another try may succeed. An error that is not Tidemill's own may be anything, and so may pass."""
    return isinstance(error, Exception) and (is_retryable(error) or not isinstance(error, TidemillError))


def report(state: RetryCallState) -> None:
    """Write why a try failed to the log of the pod."""
    error = state.outcome.exception() if state.outcome else None
    text = str(error) or type(error).__name__
    sys.stderr.write(f"try {state.attempt_number} failed, next in {state.upcoming_sleep:.0f} s: {text}\n")
