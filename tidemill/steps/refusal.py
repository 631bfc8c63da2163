"""How a failed step ends in KFP's log, which shows long lines cut off: the sentence first, in short lines."""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tidemill.errors import TidemillError, is_retryable

WIDTH = 100


@contextmanager
def explained() -> Iterator[None]:
    """Have an error of a step, which ends its process, printed by `print_failure`; a decorator of every step."""
    try:
        yield
    except Exception:
        sys.excepthook = print_failure
        raise


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the message of an error; below it the traceback, unless the user can act on the message alone."""
    expected = isinstance(error, TidemillError)
    message = str(error) if expected else f"{kind.__name__}: {error}"
    lines = ["", *(part for line in message.splitlines() for part in wrapped(line)), ""]
    if not expected or (is_retryable(error) and error.__cause__ is not None):
        lines += ["".join(traceback.format_exception(kind, error, trace))]
    sys.stderr.write("\n".join(lines))


def wrapped(line: str) -> list[str]:
    """A line in lines of at most `WIDTH` characters; words, such as addresses, stay whole."""
    return textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)
