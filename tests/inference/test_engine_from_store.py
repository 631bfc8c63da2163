"""The real engine fed by the real trainer rank through the real object store, without Ray between them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from sync_rig import SyncRig
from tiny_model import make_tiny_model

from tidemill.actors.engine import EngineActor
from tidemill.actors.ranks import RankActor
from tidemill.cluster.local import stop_services, weights_folder
from tidemill.config.run import RunConfig
from tidemill.records import Float32Array, Int32Array
from tidemill.store.server import open_store
from tidemill.weights.manifest import weights_prefix
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import ObjectStoreTransport, Publication

# vLLM warns while it is imported; that is not ours to fail on.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PROMPT = np.arange(3, 43, dtype=np.int32)


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "from-store",
            "model": str(make_tiny_model(folder / "model", seed=0)),
            "output": folder / "runs",
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "rewards": [{"function": "exact_number"}],
            "rollout": {"group_size": 4, "max_new_tokens": 16, "dtype": "float32", "threads": 1},
            "trainer": {"steps": 1, "precision": "float32", "threads": 1},
            "sync": {"transport": "object_store", "full_every": 10},
        }
    )


@dataclass
class OneRank:
    """A trainer of one rank, in this process."""

    rank: RankActor

    async def write_weights(self) -> None:
        await asyncio.to_thread(self.rank.write_weights)

    async def upload_weights(self, version: int) -> Publication:
        return await asyncio.to_thread(self.rank.upload_weights, version)

    async def upload_snapshot(self) -> Publication:
        return await asyncio.to_thread(self.rank.upload_snapshot)

    async def score(self, tokens: Int32Array) -> Float32Array:
        return self.rank.score(tokens)


async def test_an_engine_computes_what_was_published_through_the_store(tmp_path: Path) -> None:
    """Version 0 comes whole and 2 as a delta; the canary compares the numbers of both sides."""
    run = config(tmp_path)
    rank, engine = RankActor(run, run.model, 0, None), EngineActor(run, run.model, 0)
    source = OneRank(rank)
    with open_store(run.store, run.output) as store:
        rank.load(None)
        await engine.start()
        try:
            transport = ObjectStoreTransport(source, store, weights_prefix(run.name))
            sync = SyncRig(Synchronizer(run.sync, transport, source, PROMPT), engine)
            await sync.publish(0, "keep")
            for parameter in rank.policy.parameters.values():
                parameter.data[:2] *= 1.5
            metrics = await sync.publish(2, "keep")
        finally:
            await engine.shutdown()
        assert metrics["sync/full"] == 0
        assert metrics["sync/canary_gap"] < 1e-3
        sync.close()
        assert store.list(weights_prefix(run.name)) == ()
    assert not list(weights_folder(run).rglob("*.safetensors"))
    stop_services(run)
    assert not weights_folder(run).exists()
