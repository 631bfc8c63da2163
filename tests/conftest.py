"""What all tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from own_time import OwnTime

from tidemill.config.reading import load_config
from tidemill.config.run import RunConfig
from tidemill.tracking.mlflow_server import make_client

pytest_plugins = ["store_rig", "kuberay_rig", "trained_rig"]
ROOT = Path(__file__).parents[1]

# How long an example takes, or to draw one, depends on how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a test; that of one which is marked `own_time` has a time of its own."""
    return {"loop": OwnTime if item.get_closest_marker("own_time") else asyncio.SelectorEventLoop}


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
