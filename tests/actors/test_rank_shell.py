"""The shell of a trainer rank, without a model in it."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tidemill.actors.ranks import CONCURRENCY_GROUPS, RankActor, RemoteRanks
from tidemill.cluster.local import weights_folder
from tidemill.config.run import RunConfig
from tidemill.errors import SyncError
from tidemill.protocols import WeightUpdate
from tidemill.weights.transport import Publication


@pytest.fixture
def local_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def run_config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "rank-shell",
            "model": "none",
            "output": folder,
            "data": {"train": "none.jsonl"},
            "rewards": [{"function": "exact_number"}],
            "trainer": {"steps": 1},
            "sync": {"transport": "object_store"},
        }
    )


class Full:
    """Files in the memory of a pod, where nothing fits any more."""

    def write(self, path: Path, *_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


class NoModel:
    device = "cpu"
    parameters: Mapping[str, Any] = {}


def test_weights_that_do_not_fit_on_their_way_to_the_store_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    rank = RankActor(run, "none", 0, None)
    rank.policy, rank.files = NoModel(), Full()  # type: ignore[assignment]
    try:
        with pytest.raises(SyncError, match=r"no room for the weights in .* enlarge /dev/shm"):
            rank.write_weights()
    finally:
        weights_folder(run).rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
async def test_a_version_is_uploaded_and_once_more_beside_a_training_step(tmp_path: Path) -> None:
    """Else engines, or one that joins, would wait for the step, which may last longer than the deadline of a sync."""
    import ray

    class Uploader:  # in here, so that it travels whole: no worker could import this module
        def __init__(self, both: threading.Barrier) -> None:
            self.both = both

        def publish(self, store: Any, version: int, path: Path) -> Publication:
            self.both.wait(60.0)
            return Publication(WeightUpdate(version, str(path), 0))

        def snapshot(self, store: Any) -> None:
            self.both.wait(60.0)

    class Busy(RankActor):
        def __init__(self, config: RunConfig) -> None:
            self.config, self.claim, self.both = config, None, threading.Barrier(2)
            self.uploader = Uploader(self.both)  # type: ignore[assignment]

        def leased_store(self) -> Any:
            return nullcontext()

        def update(self, *_: Any) -> dict[str, float]:
            self.both.wait(60.0)
            self.both.wait(60.0)
            return {"published beside it": 1.0}

    busy = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Busy).remote(run_config(tmp_path))
    ranks = RemoteRanks((busy,), 120.0)
    step = asyncio.create_task(ranks.update([[]], 1.0, 0))
    await asyncio.sleep(0)
    publication = await ranks.upload_weights(3)
    await ranks.upload_snapshot()
    assert (publication.update.version, await step) == (3, {"published beside it": 1.0})
