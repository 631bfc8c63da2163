"""A port for a server that a test starts."""

from __future__ import annotations

import atexit
import random
import socket
from collections.abc import Sequence
from contextlib import closing

PORTS = range(23000, 30000)
"""Above the ports of Ray's workers and of the embedded store, below the ephemeral ports of Linux, so that no other
process gets one of them by itself before the server is up."""
TAKEN: list[socket.socket] = []
"""UDP sockets at the ports handed out. No test's server uses UDP; a socket that is held until this process ends tells
other calls, also those in a parallel run of tests, that its port is taken."""


@atexit.register
def give_back() -> None:
    for held in TAKEN:
        held.close()


def free_port(ports: Sequence[int] = PORTS) -> int:
    """One of `ports` without a listener, which no other call returns."""
    for port in random.SystemRandom().sample(ports, len(ports)):
        held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        TAKEN.append(held)
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"every port of {ports} is taken")
