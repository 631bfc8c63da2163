from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from api_server import Handler, Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked, server.authorizations = [], [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
