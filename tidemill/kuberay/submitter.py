"""The command of the submitter pod: submits the job of a RayJob to Ray and follows it until it has ended.

KubeRay's own command passes the runtime environment through a shell and follows the log over one connection; 30 s after
that connection ends, the operator ends the run. A run of days outlives its connections, so this command polls Ray's
dashboard for the status and the log of the job. It fails only if Ray is unreachable for long, or does not know the job
any more. The log goes to standard output, and from there to `kubectl logs` and `tidemill logs`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from types import FrameType
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tidemill.errors import RunError, TidemillError
from tidemill.retry import retrying

COMMAND = ["python3", "-m", "tidemill.kuberay.submitter"]
JOB = "TIDEMILL_JOB"
"""Environment variable: JSON with `entrypoint` and `runtime_env`, as in Ray's job API."""
ADDRESS, SUBMISSION_ID, TOKEN = "RAY_DASHBOARD_ADDRESS", "RAY_JOB_SUBMISSION_ID", "RAY_AUTH_TOKEN"
"""Environment variables that KubeRay sets."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S = 5.0
OUTAGE_S = 120.0
"""How long Ray may be unreachable, for example while its dashboard restarts."""
TIMEOUT_S = 30.0
MAX_BYTES = 16 << 20
"""Size of the longest answer that is read; the memory of the pod holds a few of them."""
LOG_BYTES_PER_S = 100_000
"""Average rate at which the log is read: Ray sends the whole log every time."""
TOO_LONG = 413
"""Status of an answer that is longer than `MAX_BYTES`."""
DRIVER_FAILED = re.compile(
    r"Job entrypoint command failed with exit code (-?\d+)(?:, last available logs[^\n]*\n(.*))?", re.DOTALL
)
"""Ray's message about a driver that failed: its exit status, and its last lines."""
PREAMBLE = re.compile(r".* job_manager\.py:\d+ -- |Running entrypoint for job ")
"""Lines that Ray itself writes to the log of a driver."""
Ask = Callable[[str, str, Mapping[str, Any] | None], tuple[int, str]]
"""Sends method, path and body to Ray's dashboard; returns status and text, or raises OSError."""


def write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class DriverLog:
    """The log of a job, copied as it grows."""

    job: str
    ask: Ask
    write: Callable[[str], None]
    position: int = 0  # characters that were copied
    due: float = 0.0  # when the log is read again
    complete: bool = True  # false once the log is too long to be read

    def copy_new(self, now: float, *, ended: bool) -> None:
        """Copy new lines if it is time to read; at the end of the job also a last line without a line break.

        A log that cannot be read does not end the run; the next call tries again.
        """
        if not self.complete or (now < self.due and not ended):
            return
        try:
            code, answer = self.ask("GET", f"/api/jobs/{self.job}/logs", None)
            text = str(json.loads(answer).get("logs") or "") if code == 200 else ""
        except (OSError, ValueError, AttributeError):  # unreachable, or not Ray's answer
            return
        if code == TOO_LONG:
            self.complete = False
            self.write("the log is too long to be shown here; the object store has all of it")
        if code != 200:
            return
        self.due = now + len(text) / LOG_BYTES_PER_S
        new = text[self.position :] if ended else text[self.position : text.rfind("\n") + 1]
        self.position += len(new)
        if new:
            self.write(new.removesuffix("\n"))


@dataclass(slots=True)
class Submission:
    """A job on its way through Ray."""

    spec: Mapping[str, Any]
    job: str  # submission id; Ray accepts a job with the same id once
    ask: Ask
    sleep: Callable[[float], None] = time.sleep
    time: Callable[[], float] = time.monotonic
    write: Callable[[str], None] = write_line
    known: bool = False  # whether Ray has accepted the job

    def follow(self) -> str:
        """Submit the job unless Ray has it, wait for its end, and return its final status.

        Raises:
            RunError: Ray refuses the job, is unreachable for `OUTAGE_S`, or has lost the job with its head.
        """
        last, log = "", DriverLog(self.job, self.ask, self.write)
        while last not in ENDED:
            try:
                status = retrying(OSError, OUTAGE_S, POLL_S, now=self.time, sleep=self.sleep)(self.poll)
            except OSError as error:
                raise RunError(f"Ray has not answered for {OUTAGE_S:.0f} s: {error}") from error
            if status is not None:
                log.copy_new(self.time(), ended=status in ENDED)
            if status is not None and status != last:
                self.write(f"job {self.job}: {status}")
                last = status
            if last not in ENDED:
                self.sleep(POLL_S)
        return last

    def poll(self) -> str | None:
        """Status of the job; None if it was submitted by this call."""
        code, text = self.ask("GET", f"/api/jobs/{self.job}", None)
        if code == 404 and self.known:
            raise RunError(f"Ray does not know job {self.job} any more: its head was replaced")
        if code == 404:
            self.check(*self.ask("POST", "/api/jobs/", {**self.spec, "submission_id": self.job}))
            self.write(f"job {self.job}: submitted")
        else:
            self.check(code, text)
        self.known = True
        return None if code == 404 else str(json.loads(text)["status"])

    def check(self, code: int, text: str) -> None:
        last = text.strip().rpartition("\n")[2]
        if code >= 500:
            raise OSError(f"Ray's dashboard answers {code}: {last}")
        if code >= 400:
            raise RunError(f"Ray refuses job {self.job} ({code}): {last}")


def dashboard(address: str, token: str | None) -> Ask:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def ask(method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://{address.removeprefix('http://')}{path}", data, headers, method=method)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                if int(response.headers.get("Content-Length") or 0) > MAX_BYTES:
                    return TOO_LONG, ""
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except HTTPException as error:
            raise OSError(f"the answer is incomplete: {error!r}") from error

    return ask


def driver_failure(message: str) -> tuple[int, str] | None:
    """Exit status and last lines of a driver that failed, from Ray's message; None for any other message."""
    found = DRIVER_FAILED.match(message)
    if found is None:
        return None
    lines = (found[2] or "").strip().splitlines()
    return int(found[1]), "\n".join(line for line in lines if PREAMBLE.match(line) is None)


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit on SIGTERM; the first process of a container ignores it by default."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    """Exit status 0 when the job has ended with any status, because the operator reads that status from Ray."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    variables = os.environ
    ask = dashboard(variables[ADDRESS], variables.get(TOKEN))
    try:
        Submission(json.loads(variables[JOB]), variables[SUBMISSION_ID], ask).follow()
    except TidemillError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
