"""Retries and waits end at their deadline; time passes only while they sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidemill.retry import retrying, wait_for


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def arguments(self) -> dict[str, Any]:
        def sleep(seconds: float) -> None:
            self.time += seconds

        return {"now": lambda: self.time, "sleep": sleep}


def failing(times: int) -> Callable[[], str]:
    """Raises OSError so often, then returns."""
    left = iter([OSError(f"failure {number}") for number in range(times)])

    def call() -> str:
        for error in left:
            raise error
        return "done"

    return call


def test_a_call_is_repeated_until_it_succeeds() -> None:
    clock, told = Clock(), []
    assert retrying(OSError, 10.0, 1.0, before_sleep=told.append, **clock.arguments())(failing(3)) == "done"
    assert (clock.time, len(told)) == (103.0, 3)


def test_the_last_error_is_raised_at_the_deadline() -> None:
    with pytest.raises(OSError, match="failure 10"):
        retrying(OSError, 10.0, 1.0, **Clock().arguments())(failing(99))


def test_other_errors_are_raised_at_once() -> None:
    clock = Clock()
    with pytest.raises(OSError, match="failure 0"):
        retrying(ValueError, 10.0, 1.0, **clock.arguments())(failing(1))
    assert clock.time == 100.0


def test_a_wait_ends_with_the_first_true_result() -> None:
    clock = Clock()
    assert wait_for(lambda: clock.time > 104.0 and clock.time, 10.0, 2.0, **clock.arguments()) == 106.0


def test_a_wait_returns_the_last_result_at_its_deadline() -> None:
    clock = Clock()
    assert wait_for(lambda: "", 10.0, 1.0, **clock.arguments()) == ""
    assert clock.time == 110.0


def test_an_error_ends_a_wait() -> None:
    with pytest.raises(OSError, match="failure 0"):
        wait_for(failing(1), 10.0, 1.0, **Clock().arguments())
