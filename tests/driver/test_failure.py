from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.driver.failure import FILE, Failure, record_failure
from tidemill.errors import ConfigError, DataError, RunError


def fail(folder: Path, error: BaseException) -> Failure:
    with pytest.raises(type(error)), record_failure("train", folder):
        raise error
    failure = Failure.read(folder)
    assert failure is not None
    return failure


def test_failed_step_is_recorded_with_message_and_trace(tmp_path: Path) -> None:
    failure = fail(tmp_path / "run", ConfigError("trainer.steps", 0, "at least 1", "Raise it."))
    assert (failure.step, failure.error, failure.expected) == ("train", "ConfigError", True)
    assert failure.message == "trainer.steps = 0. Allowed: at least 1. Raise it."
    assert "in fail" in failure.trace


def test_only_failures_that_another_try_may_fix_are_retryable(tmp_path: Path) -> None:
    assert fail(tmp_path, RunError("an actor died")).retryable
    assert not fail(tmp_path, DataError("line 3 is broken")).retryable
    assert not fail(tmp_path, TypeError("a bug")).retryable


def test_error_without_text_is_recorded_under_its_name(tmp_path: Path) -> None:
    assert fail(tmp_path, KeyboardInterrupt()).message == "KeyboardInterrupt"


def test_success_clears_the_failure_of_an_earlier_try(tmp_path: Path) -> None:
    fail(tmp_path, RunError("an actor died"))
    with record_failure("train", tmp_path):
        pass
    assert Failure.read(tmp_path) is None


def test_broken_record_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"step": "train"}')
    with pytest.raises(DataError, match=r"failure\.json is not a failure record"):
        Failure.read(tmp_path)


def test_origin_is_the_traceback_of_the_innermost_error(tmp_path: Path) -> None:
    worker = ValueError("what the worker said\nTraceback of the worker")
    try:
        raise RunError("the run ends") from worker
    except RunError as error:
        failure = fail(tmp_path, error)
    assert failure.message == "the run ends"
    assert "Traceback of the worker" in failure.origin
    assert "the run ends" not in failure.origin
