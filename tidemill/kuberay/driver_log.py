"""The log of a job as Ray's dashboard has it, passed on as it grows.

The submitter writes it, so that it is found where everybody looks: in `kubectl logs` and `tidemill logs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Ask = Callable[[str, str, Mapping[str, Any] | None], tuple[int, str]]
RATE = 100_000
"""Bytes a second that are asked for at most, on average: Ray sends all of the log every time."""
TOO_LONG = 413
"""Status of an answer that is longer than is read."""
END = re.compile(
    r"Job entrypoint command failed with exit code (-?\d+)(?:, last available logs[^\n]*\n(.*))?", re.DOTALL
)
"""Ray's message about a driver that failed: its exit status, and what it wrote last."""
PREAMBLE = re.compile(r".* job_manager\.py:\d+ -- |Running entrypoint for job ")
"""Lines that Ray itself writes to the log of a driver."""


@dataclass(slots=True)
class DriverLog:
    """What a job has written.

    Attributes:
        number: submission id of the job.
        ask: as in `submitter.Submission`; `TOO_LONG` where the answer is longer than it reads.
        tell: says lines.
        shown: characters that were told.
        due: when Ray is asked again, in seconds.
        whole: whether all of it can be told.
    """

    number: str
    ask: Ask
    tell: Callable[[str], None]
    shown: int = 0
    due: float = 0.0
    whole: bool = True

    def catch_up(self, now: float, *, ended: bool) -> None:
        """Tell the lines that are new, where it is time to ask; at the end of the job also a last one without an end.

        That the log cannot be read is no reason to end a run: it is asked for again.
        """
        if not self.whole or (now < self.due and not ended):
            return
        try:
            code, answer = self.ask("GET", f"/api/jobs/{self.number}/logs", None)
            text = str(json.loads(answer).get("logs") or "") if code == 200 else ""
        except (OSError, ValueError, AttributeError):  # away, or another server answers in its place
            return
        if code == TOO_LONG:
            self.whole = False
            self.tell("the log has become too long for here; the object store has all of it")
        if code != 200:
            return
        self.due = now + len(text) / RATE
        new = text[self.shown :] if ended else text[self.shown : text.rfind("\n") + 1]
        self.shown += len(new)
        if new:
            self.tell(new.removesuffix("\n"))


def end_of_driver(message: str) -> tuple[int, str] | None:
    """Exit status and last words of a driver that failed, from Ray's message; None where it is about something else."""
    end = END.match(message)
    if end is None:
        return None
    lines = (end[2] or "").strip().splitlines()
    return int(end[1]), "\n".join(line for line in lines if PREAMBLE.match(line) is None)
