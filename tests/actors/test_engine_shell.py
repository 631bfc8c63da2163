"""An engine's actor under a crowd of generations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tidemill.actors.engine import EngineActor, RemoteEngine, engine_shell
from tidemill.actors.placement import Placement
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import EngineId

pytestmark = pytest.mark.slow
CROWD = 3000
DEADLINE_S = 240.0


class CrowdedActor(EngineActor):
    """The shell of an engine around one whose generations stay at their first token until the next weights."""

    def __init__(self) -> None:
        self.downloader = None
        self.engine = FakeEngine(lengths=(3, 3), faults={uid: Fault("straggle", times=1) for uid in range(CROWD)})


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # where a worker finds the actor's class
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, runtime_env=here
    )
    yield
    ray.shutdown()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_a_weight_update_passes_three_thousand_open_generations(mode: PauseMode) -> None:
    engine = RemoteEngine(EngineId(0), engine_shell(CrowdedActor, Placement(), {}).remote())
    prompt, sampling = np.arange(3, dtype=np.int32), Sampling(1, 3, 1.0)
    crowd = [asyncio.create_task(engine.generate(f"{uid}.0", prompt, sampling)) for uid in range(CROWD)]
    async with asyncio.timeout(DEADLINE_S):
        while (await engine.stats())["running"] < CROWD:
            await asyncio.sleep(0.05)
    await asyncio.wait_for(engine.update_weights(WeightUpdate(1, "", 0), mode), DEADLINE_S)
    assert await asyncio.wait_for(engine.version(), DEADLINE_S) == 1
    groups = await asyncio.wait_for(asyncio.gather(*crowd), DEADLINE_S)
    expected = [(0, 0, 3)] if mode == "wait" else [(0, 0, 1), (1, 1, 3)]
    assert all([(s.version, s.start, s.end) for s in group[0].versions] == expected for group in groups)
