"""The shell of a trainer rank, without a process around it or a model in it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tidemill.actors.ranks import RankActor
from tidemill.cluster.local import weights_folder
from tidemill.config import RunConfig
from tidemill.errors import SyncError


class Full:
    """A policy whose weights do not fit into the memory of its pod."""

    device = "cpu"

    def export(self, path: str, dtype: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", path)


def test_weights_that_do_not_fit_on_their_way_to_the_store_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {
            "name": "full",
            "model": "none",
            "output": tmp_path,
            "data": {"train": "none.jsonl"},
            "rewards": [{"function": "exact_number"}],
            "trainer": {"steps": 1},
            "sync": {"transport": "object_store"},
        }
    )
    rank = RankActor(run, "none", 0, None)
    rank.policy = Full()  # type: ignore[assignment]
    try:
        with pytest.raises(SyncError, match=r"no room for the weights in .* enlarge /dev/shm"):
            rank.publish_weights(1)
    finally:
        weights_folder(run).rmdir()
