"""A port for a server that a test starts."""

from __future__ import annotations

import random
import socket

PORTS = range(23000, 30000)
"""Above the ports of Ray's workers and of the embedded store, below those that Linux hands out by itself: until the
server is up nobody else is given one of them, whatever runs beside."""


def free_port() -> int:
    """One of `PORTS` that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("every port is taken")
