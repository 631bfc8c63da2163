"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.config import RunConfig
from tidemill.run_file import load_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def addition(tmp_path: Path) -> RunConfig:
    """The demo's settings, writing below a temporary folder."""
    return load_config(ROOT / "examples/addition.yaml", [f"output={tmp_path / 'runs'}"])
