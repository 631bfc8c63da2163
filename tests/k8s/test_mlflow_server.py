"""The MLflow server of k8s/: its host names, and the migration of an older database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kustomize_rig import of_kind

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
OLDER = "75868b020152"
"""Schema version of an earlier MLflow."""


def pod() -> Mapping[str, Any]:
    [tree] = [m.tree for m in of_kind("Deployment") if m.tree["metadata"]["name"] == "mlflow"]
    found: Mapping[str, Any] = tree["spec"]["template"]["spec"]
    return found


def allowed_hosts() -> list[str]:
    [option] = [arg for arg in pod()["containers"][0]["args"] if arg.startswith("--allowed-hosts=")]
    return [host.strip() for host in option.removeprefix("--allowed-hosts=").split(",")]


def answers(host: str) -> bool:
    from mlflow.server.security_utils import is_allowed_host_header

    return bool(is_allowed_host_header(allowed_hosts(), host))


@pytest.mark.parametrize(
    "host",
    [
        "mlflow:5000",
        "mlflow.tidemill.svc:5000",
        "mlflow.team-a.svc.cluster.local:5000",
        "mlflow.tidemill.svc",
        "localhost:5000",
        "127.0.0.1:41233",
    ],
)
def test_mlflow_server_answers_to_its_own_host_names(host: str) -> None:
    assert answers(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "mlflow.evil.example:5000",
        "mlflow.svc.evil.example:5000",
        "10.evil.example",
        "10.0.0.1.evil.example:5000",
        "172.evil.example",
        "192.168.evil.example:5000",
        "localhost.evil.example:5000",
    ],
)
def test_mlflow_server_refuses_host_names_that_can_be_registered(host: str) -> None:
    assert not answers(host)


def migrate(database: Path) -> None:
    """Run the migration that precedes the server, on a database of the test."""
    [container] = pod()["initContainers"]
    program, *arguments = container["command"]
    told = {"$(MLFLOW_BACKEND_STORE_URI)": f"sqlite:///{database}"}
    command = [str(Path(sys.executable).with_name(program)), *(told.get(word, word) for word in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def version_of(database: Path) -> str:
    with sqlite3.connect(database) as connection:
        [(version,)] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    connection.close()
    return str(version)


def make_older(database: Path) -> None:
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config, create_sqlalchemy_engine_with_retry
    from mlflow.store.tracking.dbmodels.initial_models import Base

    uri = f"sqlite:///{database}"
    engine, config = create_sqlalchemy_engine_with_retry(uri), _get_alembic_config(uri)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, OLDER)
    engine.dispose()


def test_database_is_migrated_before_the_start(tmp_path: Path) -> None:
    new, old = tmp_path / "new.db", tmp_path / "old.db"
    migrate(new)
    make_older(old)
    assert version_of(old) == OLDER != version_of(new)
    migrate(old)
    migrate(old)  # also without changes
    assert version_of(old) == version_of(new)


def test_the_migrated_database_is_the_served_one() -> None:
    def uri(container: Mapping[str, Any]) -> str:
        [value] = [each["value"] for each in container["env"] if each["name"] == "MLFLOW_BACKEND_STORE_URI"]
        return str(value)

    [before], [server] = pod()["initContainers"], pod()["containers"]
    assert uri(before) == uri(server)
    assert before["image"] == server["image"]
