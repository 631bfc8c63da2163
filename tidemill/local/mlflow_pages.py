"""`tidemill ui`: MLflow's server over a folder of runs, from its start to Ctrl-C, without its chatter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from rich.console import Console

from tidemill.cluster.processes import adopt_orphans, end_descendants
from tidemill.errors import RunError
from tidemill.local.interrupt import interruptible, undisturbed
from tidemill.local.outcome import say, shown, tail_of

START_TIMEOUT_S, PROBE_TIMEOUT_S, POLL_S, GRACE_S = 300.0, 5.0, 0.2, 10.0


def serve(database: Path, port: int, console: Console, *, debug: bool) -> int:
    """Serve until a signal ends it, and leave no process behind; returns the exit status of the command.

    Args:
        database: MLflow's file below the folder of runs.
        port: a free one.
        console: where to say so.
        debug: whether the server's output goes to the screen.

    Raises:
        RunError: the server does not answer in time, or ends by itself.
    """
    adopt_orphans()
    with TemporaryFile() as log:
        try:
            with interruptible():
                say(f"MLflow of {shown(database.parent)} is starting; Ctrl-C ends it", console)
                server = start(database, port, None if debug else log)
                wait_for_answer(server, port, log)
                say(f"open http://127.0.0.1:{port}", console)
                server.wait()
                raise ended(log)
        except KeyboardInterrupt:
            return 0
        finally:
            with undisturbed():
                end_descendants(GRACE_S)


def start(database: Path, port: int, output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the server apart from our terminal's signals, without the processes for jobs that nobody gives it."""
    artifacts = (database.parent / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    options = ["--artifacts-destination", artifacts, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return subprocess.Popen(
        [*command, *options],
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def wait_for_answer(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Return once the server can be asked.

    Raises:
        RunError: it has ended, or does not answer in time; with the end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(port):
        if server.poll() is not None:
            raise ended(log)
        if time.monotonic() > deadline:
            raise RunError(f"MLflow does not answer after {START_TIMEOUT_S:.0f} s; the end of its log:\n{end_of(log)}")
        time.sleep(POLL_S)


def answers(port: int) -> bool:
    """Whether a server on this machine says that it is well."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def ended(log: IO[bytes]) -> RunError:
    """The server ended, and nobody asked it to."""
    return RunError(f"MLflow has ended; the end of its log:\n{end_of(log)}")


def end_of(log: IO[bytes]) -> str:
    """The last lines of the server's output."""
    log.seek(0)
    return tail_of(log.read().decode(errors="replace"))
