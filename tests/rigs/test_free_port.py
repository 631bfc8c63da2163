"""Ports for the servers of tests."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import free_port
import pytest

CLAIM = "import free_port, sys; print(free_port.free_port([int(sys.argv[1])]))"


def test_a_port_is_given_once_also_to_another_process() -> None:
    port = free_port.free_port()
    with pytest.raises(RuntimeError, match=rf"every port of \[{port}\] is taken"):
        free_port.free_port([port])
    command = [sys.executable, "-c", CLAIM, str(port)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "is taken" in done.stderr


def test_a_server_takes_the_port_that_was_given() -> None:
    port = free_port.free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
