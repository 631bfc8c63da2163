"""`tidemill ui`: MLflow's server on a folder of runs, until Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import webbrowser
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from rich.console import Console

from tidemill.cluster.processes import SAFE_PATH, adopt_orphans, end_descendants, interruptible, signals_ignored
from tidemill.errors import RunError
from tidemill.local.messages import print_line, shown, tail_of
from tidemill.retry import wait_for
from tidemill.tracking.mlflow_server import make_client, runs_page

DISPLAYS = {"DISPLAY", "WAYLAND_DISPLAY"}
START_TIMEOUT_S, PROBE_TIMEOUT_S, POLL_S, GRACE_S = 300.0, 5.0, 0.2, 10.0


def serve(database: Path, port: int, console: Console, *, debug: bool) -> int:
    """Serve until a signal, and end every process of the server; returns the exit status of the command.

    Prints the page of the runs, and opens it where there is a graphical display.

    Args:
        database: MLflow's file below the folder of runs.
        port: a free port.
        console: where to print the address.
        debug: whether the output of the server goes to the screen.

    Raises:
        RunError: the server does not answer in time, or exits.
    """
    adopt_orphans()
    with TemporaryFile() as log:
        try:
            with interruptible():
                print_line(f"MLflow of {shown(database.parent)} is starting; Ctrl-C ends it", console)
                server = start(database, port, None if debug else log)
                wait_for_answer(server, port, log)
                page = f"http://127.0.0.1:{port}{runs_page(make_client(f'sqlite:///{database}'))}"
                print_line(f"open {page}", console)
                if (
                    console.is_terminal and DISPLAYS & os.environ.keys()
                ):  # else it could start a browser in the terminal
                    webbrowser.open(page)
                server.wait()
                raise RunError(f"MLflow has ended; the end of its log:\n{end_of(log)}")
        except KeyboardInterrupt:
            return 0
        finally:
            with signals_ignored():
                end_descendants(GRACE_S)


def start(database: Path, port: int, output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the server in a session of its own, which gets no signals of the terminal, without job processes."""
    artifacts = (database.parent / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    options = ["--artifacts-destination", artifacts, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return subprocess.Popen(
        [*command, *options],
        env=os.environ | SAFE_PATH | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        cwd=database.parent,  # its own server puts the working directory before Python's modules
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def wait_for_answer(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Return once the server answers.

    Raises:
        RunError: it has ended, or does not answer in time; with the end of its log.
    """
    wait_for(lambda: server.poll() is not None or answers(port), START_TIMEOUT_S, POLL_S)
    if server.poll() is not None:
        raise RunError(f"MLflow has ended; the end of its log:\n{end_of(log)}")
    if not answers(port):
        raise RunError(f"MLflow does not answer after {START_TIMEOUT_S:.0f} s; the end of its log:\n{end_of(log)}")


def answers(port: int) -> bool:
    """Whether a server on this machine reports that it is healthy."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def end_of(log: IO[bytes]) -> str:
    """The last lines of the server's output."""
    log.seek(0)
    return tail_of(log.read().decode(errors="replace"))
