"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tidemill.config import RunConfig
from tidemill.run_file import load_config
from tidemill.store.mlflow_server import make_client

ROOT = Path(__file__).parents[1]

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on how busy the machine is
settings.load_profile("untimed")


@pytest.fixture
def addition(tmp_path: Path) -> RunConfig:
    """The demo's settings, writing below a temporary folder."""
    return load_config(ROOT / "examples/addition.yaml", [f"output={tmp_path / 'runs'}"])


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take three seconds to make."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    make_client(f"sqlite:///{path}").search_registered_models()
    return path
