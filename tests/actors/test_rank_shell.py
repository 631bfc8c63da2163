"""The shell of a trainer rank, without a model in it."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tidemill.actors.ranks import CONCURRENCY_GROUPS, RankActor, RemoteRanks
from tidemill.cluster.local import weights_folder
from tidemill.config import RunConfig
from tidemill.errors import SyncError


@pytest.fixture
def local_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


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


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
async def test_a_version_is_published_again_beside_a_training_step() -> None:
    """Else an engine that joins would wait for the step, and a step may last longer than any deadline of a sync."""
    import ray

    class Publisher:  # in here, so that it travels whole: no worker could import this module
        def __init__(self, again: threading.Event) -> None:
            self.again = again

        def snapshot(self, store: Any) -> None:
            self.again.set()

    class Busy(RankActor):
        def __init__(self) -> None:
            self.claim, self.again = None, threading.Event()
            self.publisher = Publisher(self.again)  # type: ignore[assignment]

        def store(self) -> Any:
            return nullcontext()

        def update(self, *_: Any) -> dict[str, float]:
            return {"published beside it": float(self.again.wait(60.0))}

    ranks = RemoteRanks((ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Busy).remote(),), 120.0)
    step = asyncio.create_task(ranks.update([[]], 1.0, 0))
    await asyncio.sleep(0)
    await ranks.republish_weights()
    assert await step == {"published beside it": 1.0}
