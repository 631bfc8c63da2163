"""What the tests of the training side share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_rig import save_llama


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products are slower on several threads, far slower on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama whose head is tied to its embedding."""
    return save_llama(tmp_path_factory.mktemp("llama"))
