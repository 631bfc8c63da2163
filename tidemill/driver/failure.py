"""The record of a failed pipeline step, from which the launcher and the watcher report why it failed.

A step runs in its own process, and its runner reports no more than success or failure.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.errors import DataError, TidemillError, is_retryable

FILE = "failure.json"
PERMANENT_FAILURE = 2
"""Exit status of a driver whose failure every other attempt would repeat."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step failed.

    Attributes:
        step: name of the step.
        error: class of the exception.
        message: text of the exception.
        expected: whether it is a TidemillError, whose text is a complete message.
        retryable: whether another try may succeed.
        origin: traceback of the innermost cause, such as the error of a worker.
        trace: the whole traceback.
    """

    step: str
    error: str
    message: str
    expected: bool
    retryable: bool
    origin: str
    trace: str

    @classmethod
    def of(cls, step: str, error: BaseException) -> Failure:
        """The record of the exception that is being handled."""
        return cls(
            step=step,
            error=type(error).__name__,
            message=str(error) or type(error).__name__,
            expected=isinstance(error, TidemillError),
            retryable=is_retryable(error),
            origin="".join(traceback.format_exception(innermost(error), chain=False)),
            trace=traceback.format_exc(),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, where: object) -> Failure:
        """Parse the result of `to_json`.

        Raises:
            DataError: the text is something else; the message names its source, `where`.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is not a failure record: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the record to a run's folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{FILE}.partial"
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Failure | None:
        """The record in a run's folder, or None.

        Raises:
            DataError: it cannot be parsed.
        """
        path = folder / FILE
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), path)
        except FileNotFoundError:
            return None

    @staticmethod
    def clear(folder: Path) -> None:
        """Remove the record before the step is tried again."""
        (folder / FILE).unlink(missing_ok=True)


def innermost(error: BaseException) -> BaseException:
    """The first cause of an error; the text of a Ray error contains the traceback of the worker."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def record_failure(step: str, folder: Path) -> Iterator[None]:
    """Write a record if the body fails."""
    Failure.clear(folder)
    try:
        yield
    except BaseException as error:
        Failure.of(step, error).write(folder)
        raise
