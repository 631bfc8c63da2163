"""A port for a server that a test starts."""

from __future__ import annotations

import atexit
import random
import socket
from contextlib import closing

PORTS = range(23000, 30000)
"""Above the ports of Ray's workers and of the embedded store, below those that Linux hands out by itself: until the
server is up nobody else is given one of them, whatever runs beside."""
TAKEN: list[socket.socket] = []
"""The same ports of UDP, which no server of a test uses. Held until this process ends, they tell other calls, also
those in the other half of the tests, that a port is given away."""


@atexit.register
def give_back() -> None:
    for held in TAKEN:
        held.close()


def free_port() -> int:
    """One of `PORTS` that nobody listens on, and that nobody else is given."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
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
    raise RuntimeError("every port is taken")
