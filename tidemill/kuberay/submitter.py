"""Hands the job of a RayJob to Ray and stays until it has ended: the command of the submitter pod.

KubeRay's own command passes the runtime environment through a shell, and follows the job's log over one connection;
30 s after that ends, the operator ends the run. A run of days outlives its connections, so this one asks again and
again, for the status and for what the job has written. It gives up only when Ray is away for long or no longer knows
the job.
"""

from __future__ import annotations

import json
import os
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
from tidemill.kuberay.driver_log import TOO_LONG, Ask, DriverLog

COMMAND = ["python3", "-m", "tidemill.kuberay.submitter"]
JOB = "TIDEMILL_JOB"
"""Environment variable: JSON of `entrypoint` and `runtime_env`, as Ray's job API takes them."""
ADDRESS, NUMBER, TOKEN = "RAY_DASHBOARD_ADDRESS", "RAY_JOB_SUBMISSION_ID", "RAY_AUTH_TOKEN"
"""What KubeRay tells the submitter."""
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
POLL_S = 5.0
PATIENCE_S = 120.0
"""Ray may be away for so long: its head restarts its dashboard, or the network does not hold."""
TIMEOUT_S = 30.0
LONGEST = 16 << 20
"""Bytes of an answer that are read; the pod has memory for some of them."""


def say(text: str) -> None:
    """Write lines at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Submission:
    """A job on its way through Ray.

    Attributes:
        job: `entrypoint` and `runtime_env`.
        number: its submission id, under which Ray takes it once.
        ask: sends method, path and body to Ray's dashboard; returns status and text, OSError where there is no answer.
        sleep: waits so many seconds.
        time: seconds of a clock that never goes back.
        tell: says a line.
    """

    job: Mapping[str, Any]
    number: str
    ask: Ask
    sleep: Callable[[float], None] = time.sleep
    time: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] = say

    def follow(self) -> str:
        """Submit the job unless Ray has it, and wait for its end; returns its last status.

        Raises:
            RunError: Ray refuses it, is away for `PATIENCE_S`, or has lost it, as a new head has.
        """
        known, told, heard = False, "", self.time()
        log = DriverLog(self.number, self.ask, self.tell)
        while True:
            try:
                status = self.look()
                if status is None and known:
                    raise RunError(f"Ray no longer knows job {self.number}: its head was replaced")
                known = status is not None or self.submit()
            except OSError as error:
                if self.time() - heard > PATIENCE_S:
                    raise RunError(f"Ray has not answered for {PATIENCE_S:.0f} s: {error}") from error
            else:
                heard = self.time()
                if status is not None:
                    log.catch_up(heard, ended=status in ENDS)
                if status is not None and status != told:
                    self.tell(f"job {self.number}: {status}")
                    told = status
                if told in ENDS:
                    return told
            self.sleep(POLL_S)

    def look(self) -> str | None:
        """Status of the job, None where Ray does not know it."""
        code, text = self.ask("GET", f"/api/jobs/{self.number}", None)
        if code == 404:
            return None
        self.expect(code, text)
        return str(json.loads(text)["status"])

    def submit(self) -> bool:
        """Hand the job over; true once Ray has taken it."""
        code, text = self.ask("POST", "/api/jobs/", {**self.job, "submission_id": self.number})
        self.expect(code, text)
        self.tell(f"job {self.number}: submitted")
        return True

    def expect(self, code: int, text: str) -> None:
        """Nothing, if Ray says that all is well.

        Raises:
            OSError: it may say so later.
            RunError: it never will.
        """
        last = text.strip().rpartition("\n")[2]
        if code >= 500:
            raise OSError(f"it answers {code}: {last}")
        if code >= 400:
            raise RunError(f"Ray refuses job {self.number} ({code}): {last}")


def dashboard(address: str, token: str | None) -> Ask:
    """Requests to the dashboard at `HOST:PORT`."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def ask(method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://{address.removeprefix('http://')}{path}", data, headers, method=method)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                if int(response.headers.get("Content-Length") or 0) > LONGEST:
                    return TOO_LONG, ""
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except HTTPException as error:
            raise OSError(f"it breaks off: {error!r}") from error

    return ask


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """End at once on SIGTERM, which the first process of a container would not do by itself."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    """Exit status 0 when the job has ended, however: its status tells the operator how."""
    signal.signal(signal.SIGTERM, leave)
    told = os.environ
    try:
        Submission(json.loads(told[JOB]), told[NUMBER], dashboard(told[ADDRESS], told.get(TOKEN))).follow()
    except TidemillError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
