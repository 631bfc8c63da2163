from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import Handler, Server
from kuberay_rig import Rig, settings

from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with embedded_store(tmp_path_factory.mktemp("weed")) as info:
        yield ObjectStore.connect(info.endpoint, "watched", info.access_key, info.secret_key)


@pytest.fixture
def rig(tmp_path: Path, bucket: ObjectStore) -> Iterator[Rig]:
    rig = Rig(settings(f"run-{secrets.token_hex(3)}", tmp_path), bucket)
    yield rig
    for log in rig.logs:
        log.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked, server.authorizations = [], [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
