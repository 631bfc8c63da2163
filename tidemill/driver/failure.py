"""What is written down when a step of the pipeline fails, so that whoever started it can say why.

A step runs in a process of its own, below a runner that only tells success from failure.
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
"""Exit status of a driver whose failure another attempt would only repeat."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step failed.

    Attributes:
        step: its name.
        error: the class of the exception.
        message: its text.
        expected: whether it is one of Tidemill's own errors, whose text says it all.
        retryable: whether another try may succeed.
        origin: the traceback of the innermost error, such as the one of the worker that failed.
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
        """The record of an exception that is being handled."""
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
        """The text of the record."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, where: object) -> Failure:
        """Read what `to_json` made.

        Raises:
            DataError: it is something else; `where` says in the message where it stood.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is not the record of a failure: {error}") from error

    def write(self, folder: Path) -> None:
        """Leave the record in a run's folder; a reader sees all of it or nothing."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{FILE}.partial"
        partial.write_text(self.to_json(), encoding="utf-8")
        partial.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Failure | None:
        """The record of a run's folder, if there is one.

        Raises:
            DataError: it cannot be read.
        """
        path = folder / FILE
        try:
            return cls.from_json(path.read_text(encoding="utf-8"), path)
        except FileNotFoundError:
            return None

    @staticmethod
    def clear(folder: Path) -> None:
        """Remove the record: the step is tried again, or has succeeded."""
        (folder / FILE).unlink(missing_ok=True)


def innermost(error: BaseException) -> BaseException:
    """Where a chain of causes begins; an error of Ray there holds the traceback of the worker in its text."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def record_failure(step: str, folder: Path) -> Iterator[None]:
    """Record the failure of the body, and nothing if it succeeds."""
    Failure.clear(folder)
    try:
        yield
    except BaseException as error:
        Failure.of(step, error).write(folder)
        raise
