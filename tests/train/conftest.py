"""What the tests of the training side share."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_rig import save_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama whose head is tied to its embedding."""
    return save_llama(tmp_path_factory.mktemp("llama"))
