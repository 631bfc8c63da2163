"""What runs in a reward worker process. Standard library only at import, so that a worker starts quickly."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.errors import RewardError
from tidemill.rollout.rewards import Response, as_parts, resolve


@dataclass(frozen=True, slots=True)
class Call:
    """One reward function applied to all responses of one prompt.

    Attributes:
        function: name or import path.
        label: under which the values are reported.
        options: keyword arguments from the config.
        columns: `prompt`, `answer` and `extra` of the row.
        responses: the decoded responses.
    """

    function: str
    label: str
    options: Mapping[str, Any]
    columns: Mapping[str, Any]
    responses: Sequence[Response]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The parts for every response, or the traceback of the first that failed."""

    parts: tuple[Mapping[str, float], ...] = ()
    error: str | None = None


def prepare(search_path: Sequence[str], functions: Sequence[str]) -> None:
    """Initialise a worker: find the user's modules, import early, end with the parent."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.path[:0] = [folder for folder in search_path if folder not in sys.path]
    # It warns that the caller must enforce the time-out, which the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for function in functions:
        # A worker that dies here would be started again without end; `check` reports the same error to the user.
        with contextlib.suppress(RewardError):
            resolve(function)


def end_with_parent() -> None:
    """Leave when the process that started this one is gone, however it ended and whatever runs here."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def check(functions: Sequence[str]) -> str | None:
    """The message of the first function that cannot be resolved, if any."""
    for function in functions:
        try:
            resolve(function)
        except RewardError as error:
            return str(error)
    return None


def score(call: Call) -> Outcome:
    """Apply the function to each response; the error travels as text, because not every exception can be pickled."""
    try:
        function = resolve(call.function)
        values = [function(response, **call.columns, **call.options) for response in call.responses]
        return Outcome(parts=tuple(as_parts(call.label, value) for value in values))
    except RewardError as error:  # a sentence, where a traceback of ours would hide it
        return Outcome(error=str(error))
    except (Exception, SystemExit):  # noqa: BLE001 - the boundary of the process; the pool raises it
        return Outcome(error=traceback.format_exc())
