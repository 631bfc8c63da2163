"""Two trainer ranks in processes of their own do together what needs their halves of the parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import make_tiny_model, tiny_llama

from tidemill.actors.ranks import RemoteRanks, start_ranks
from tidemill.config.run import RunConfig
from tidemill.store.server import open_store

pytestmark = pytest.mark.slow
TOKENS = np.arange(3, 20, dtype=np.int32)
DEADLINE_S = 300.0


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "two-ranks",
            "model": str(make_tiny_model(folder / "model", seed=0)),
            "output": folder / "runs",
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "rewards": [{"function": "exact_number"}],
            "rollout": {"dtype": "float32"},
            "trainer": {"steps": 1, "ranks": 2, "precision": "float32", "threads": 1, "get_timeout_s": DEADLINE_S},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


async def follow_a_run(ranks: RemoteRanks, folder: Path) -> tuple[str, str]:
    """Everything that the schedule asks of the ranks, in its order; returns the URIs of checkpoint and model."""
    await ranks.load()
    assert await ranks.export(folder / "exported") == (folder / "exported").stat().st_size
    await ranks.write_weights()
    publication = await ranks.upload_weights(1)
    assert publication.update.version == 1
    await ranks.snapshot()
    checkpoint = await ranks.upload(1, {"step": 1})
    await ranks.restore(1)
    return checkpoint, await ranks.publish_model(1)


async def test_two_ranks_serve_the_schedule_as_one_does(tmp_path: Path) -> None:
    run = config(tmp_path)
    with open_store(run.store, run.output):
        ranks = start_ranks(run, run.model)
        checkpoint, model = await asyncio.wait_for(follow_a_run(ranks, tmp_path), DEADLINE_S)
        scores = await asyncio.wait_for(ranks.score(TOKENS), DEADLINE_S)
    assert (checkpoint[-8:], model[-7:]) == ("00000001", "model/1")
    wanted = {name: parameter.detach() for name, parameter in tiny_llama(0).named_parameters()}
    exported = load_file(tmp_path / "exported")
    assert all(torch.equal(exported[name], parameter) for name, parameter in wanted.items())
    assert {p.name for p in run.folder.iterdir()} & {"staging-0", "staging-1", "restored", "restored.name"} == set()
    with torch.inference_mode():
        logits = tiny_llama(0)(torch.tensor(TOKENS[None]).long()).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:, None]).long())[:, 0]
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
