"""`tidemill ui` as a user runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import psutil
import pytest
from free_port import free_port

from tidemill.errors import RunError
from tidemill.local.mlflow_ui import answers, wait_for_answer

TIMEOUT_S = 300
ATTEMPTS = 20  # at an answer in time from a server on a busy machine


def test_server_that_ends_at_its_start_says_why() -> None:
    with TemporaryFile() as log:
        command = [sys.executable, "-c", "print('no such table'); raise SystemExit(3)"]
        with subprocess.Popen(command, stdout=log) as server:
            server.wait(TIMEOUT_S)
            with pytest.raises(RunError, match="MLflow has ended; the end of its log:\nno such table"):
                wait_for_answer(server, free_port(), log)


def test_nobody_answers_on_a_free_port() -> None:
    assert not answers(free_port())


@pytest.mark.slow
def test_ui_is_served_until_an_interrupt_which_leaves_no_process_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/queue.py").write_text("JOBS = []\n")
    (tmp_path / "mlflow.db").touch()  # a database without tables, which MLflow makes
    port = free_port()
    command = [sys.executable, "-P", "-m", "tidemill.cli.main", "ui", "--output", str(tmp_path), "--port", str(port)]
    with subprocess.Popen(
        command, cwd=tmp_path / "here", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        served = any(answers(port) for _ in range(ATTEMPTS))
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert lines == [f"MLflow of {tmp_path} is starting; Ctrl-C ends it\n", f"open http://127.0.0.1:{port}/\n"]
    assert (served, rest, process.returncode) == (True, "", 0)
    assert below and [each for each in below if each.is_running()] == []
