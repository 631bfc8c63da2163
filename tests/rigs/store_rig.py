import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_port import free_port

from tidemill.config.run import RunConfig
from tidemill.errors import StoreError
from tidemill.retry import retrying
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store

Server = tuple[str, str, str]


def minio_binary() -> Path:
    return Path(os.environ.get("TIDEMILL_MINIO", "~/.cache/tidemill/bin/minio")).expanduser()


def require_minio() -> None:
    """Skip a test without MinIO; in continuous integration, which builds it, such a test fails."""
    if not minio_binary().is_file():
        end = pytest.fail if os.environ.get("CI") else pytest.skip
        end(f"no MinIO at {minio_binary()}: run `make minio`, or set TIDEMILL_MINIO")


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with embedded_store(tmp_path_factory.mktemp("seaweedfs")) as info:
        yield info.endpoint, info.access_key, info.secret_key


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_minio()
    folder, address = tmp_path_factory.mktemp("minio"), f"127.0.0.1:{free_port()}"
    keys = {"MINIO_ROOT_USER": "tidemill", "MINIO_ROOT_PASSWORD": secrets.token_hex(16)}
    command = [str(minio_binary()), "server", str(folder / "data"), "--address", address]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **keys}, stdout=log, stderr=log)
    server = (f"http://{address}", keys["MINIO_ROOT_USER"], keys["MINIO_ROOT_PASSWORD"])
    try:
        retrying(StoreError, 120.0, 0.1)(ObjectStore.connect, server[0], "ready", *server[1:])
        yield server
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(params=["seaweedfs", "minio"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found


@contextmanager
def bucket(server: Server) -> Iterator[ObjectStore]:
    """A new bucket, removed afterwards: each bucket takes volumes, of which SeaweedFS has few on a small disk."""
    store = ObjectStore.connect(server[0], f"test-{secrets.token_hex(4)}", *server[1:])
    yield store
    for item in store.list(""):
        store.delete(item.key)
    store.client.remove_bucket(bucket_name=store.bucket)


@pytest.fixture
def store(server: Server) -> Iterator[ObjectStore]:
    with bucket(server) as store:
        yield store


@pytest.fixture
def seaweedfs(seaweedfs_server: Server) -> Iterator[ObjectStore]:
    with bucket(seaweedfs_server) as store:
        yield store


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "addition",
            "model": "some/model",
            "output": tmp_path / "runs",
            "data": {"train": "train.jsonl"},
            "rewards": [{"function": "exact_number", "options": {"odd key!": "x" * 7000}}],
            "trainer": {"steps": 4},
        }
    )


@pytest.fixture
def mlflow_config(run_config: RunConfig, empty_mlflow: Path) -> RunConfig:
    run_config.output.mkdir()
    shutil.copy(empty_mlflow, run_config.output / "mlflow.db")
    return run_config
