"""Engines in processes of their own that are killed, and replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from sync_rig import FakeWeights
from tiny_model import make_tiny_model

from tidemill.actors.engine import EngineActor, RemoteEngine, engine_shell
from tidemill.actors.placement import Placement
from tidemill.actors.queue import start_queue
from tidemill.actors.rollouter import start_rollouter
from tidemill.config.asynchrony import SyncConfig
from tidemill.config.run import RunConfig
from tidemill.errors import EngineLostError
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import Sampling
from tidemill.records import EngineId
from tidemill.rollout.fleet import Fleet, FleetLimits
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import SharedMemoryTransport

pytestmark = pytest.mark.slow
CANARY = np.arange(6, dtype=np.int32)
DEADLINE_S = 240.0

LIMITS = FleetLimits(DEADLINE_S)


class FakeActor(EngineActor):
    """The shell of an engine around a fake one, with a process of its own below, as vLLM has."""

    def __init__(self) -> None:
        import subprocess

        self.downloader = None
        self.engine = FakeEngine(faults={1007: Fault("hang")}, token_delay_s=0.01)
        self.child = subprocess.Popen(["sleep", "600"])

    async def start(self) -> None:
        pass

    async def processes(self) -> list[int]:
        return [os.getpid(), self.child.pid]


class Pool:
    """The rotation of a rollouter, which only remembers."""

    def __init__(self) -> None:
        self.joined: dict[EngineId, int] = {}
        self.removed: list[EngineId] = []

    async def add_engine(self, engine_id: EngineId, engine: RemoteEngine) -> None:
        self.joined[engine_id] = await engine.version()

    async def remove_engine(self, engine_id: EngineId, reason: str, drain_s: float = 0.0) -> int:
        self.removed.append(engine_id)
        return 0

    async def lost_engines(self) -> dict[EngineId, str]:
        return {}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")  # as `cluster.local` does
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rigs"), os.environ.get("PYTHONPATH", "")]
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}  # where a worker finds the actor's class
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env=here,
    )
    yield
    ray.shutdown()


def start(engine_id: EngineId) -> RemoteEngine:
    return RemoteEngine(engine_id, engine_shell(FakeActor, Placement(), {}).remote(), end_timeout_s=5.0)


@asynccontextmanager
async def fleet_of(
    folder: Path, engines: list[RemoteEngine], pool: Pool, limits: FleetLimits = LIMITS
) -> AsyncIterator[Fleet]:
    source = FakeWeights()
    synchronizer = Synchronizer(SyncConfig(), SharedMemoryTransport(folder / "shm", source), source, CANARY)
    fleet = Fleet(engines, start, limits, pool, synchronizer, lambda text: None)
    await asyncio.gather(*(engine.start() for engine in engines))
    async with asyncio.timeout(DEADLINE_S), fleet.kept():
        await fleet.publish(4, "keep")
        yield fleet
    await asyncio.gather(*(member.end() for member in fleet.members))


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_killed_or_stopped_is_replaced_and_nothing_is_left_of_it(
    tmp_path: Path, death: signal.Signals
) -> None:
    engines, pool = [start(EngineId(0)), start(EngineId(1))], Pool()
    async with fleet_of(tmp_path, engines, pool, FleetLimits(DEADLINE_S, probe_timeout_s=15.0)) as fleet:
        [pid, child] = await engines[0].actor.processes.remote()
        request = asyncio.create_task(engines[0].generate("1007.0", CANARY, Sampling(1, 3, 1.0)))
        await asyncio.sleep(0.1)
        os.kill(pid, death)
        with pytest.raises(EngineLostError, match="engine 0 died"):
            await request
        while not pool.joined:
            await asyncio.sleep(0.05)
        assert (pool.removed, pool.joined) == ([EngineId(0)], {EngineId(2): 4})
        await fleet.publish(5, "keep")
        assert [await member.version() for member in fleet.members] == [5, 5]
        while any(psutil.pid_exists(gone) and is_alive(gone) for gone in (pid, child)):
            await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_publication_goes_on_without_an_engine_that_dies_in_it(tmp_path: Path) -> None:
    engines, pool = [start(EngineId(0)), start(EngineId(1))], Pool()
    async with fleet_of(tmp_path, engines, pool) as fleet:
        [pid, _] = await engines[0].actor.processes.remote()
        os.kill(pid, signal.SIGKILL)
        await fleet.publish(5, "keep")
        assert await engines[1].version() == 5
        while not pool.joined:
            await asyncio.sleep(0.05)
        assert pool.joined == {EngineId(2): 5}


async def test_a_rollouter_in_a_process_of_its_own_loses_no_group_with_an_engine(tmp_path: Path) -> None:
    steps = 10
    (tmp_path / "train.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"w{n}", "answer": "1"}) for n in range(5, 90))
    )
    config = RunConfig.model_validate(
        {
            "name": "lost",
            "model": str(make_tiny_model(tmp_path / "model", seed=0)),
            "output": tmp_path,
            "data": {"train": str(tmp_path / "train.jsonl")},
            "rewards": [{"function": "exact_number"}],
            "rollout": {"group_size": 2, "max_new_tokens": 8, "engines": 2},
            "trainer": {"steps": steps, "ppo_mini_batch_size": 4},
        }
    )
    queue, engines = start_queue(config.queue_capacity, 1, "block"), [start(EngineId(0)), start(EngineId(1))]
    generation = start_rollouter(config, config.model, engines, queue, None, 0)
    await generation.start()
    source = FakeWeights()
    synchronizer = Synchronizer(SyncConfig(), SharedMemoryTransport(tmp_path / "shm", source), source, CANARY)
    fleet = Fleet(engines, start, LIMITS, generation, synchronizer, lambda text: None)
    trained: list[int] = []
    async with asyncio.timeout(DEADLINE_S), fleet.kept():
        await fleet.publish(0, "keep")
        running = asyncio.create_task(generation.run())
        for version in range(steps):
            if version == 2:
                [pid, _] = await engines[0].actor.processes.remote()
                os.kill(pid, signal.SIGKILL)
            if version == 6:
                while [member.id for member in fleet.members] != [EngineId(1), EngineId(2)]:
                    await asyncio.sleep(0.05)
            lease = await queue.lease(4, version, DEADLINE_S)
            while not lease.deliveries:  # it was answered at once, with what had become too old
                await generation.reissue(lease.swept, "stale")
                lease = await queue.lease(4, version, DEADLINE_S)
            await generation.reissue(lease.swept, "stale")
            await queue.acknowledge(lease.lease_id)
            await generation.mark_trained([delivery.header.uid for delivery in lease.deliveries])
            trained += [delivery.header.uid for delivery in lease.deliveries]
            await fleet.publish(version + 1, "keep")
            await generation.begin_version(version + 1)
        await generation.stop()
        await running
    ledger = await generation.ledger_state()
    assert len(set(trained)) == len(trained) == steps * 4 == ledger["trained"]
    assert (ledger["quarantined"], ledger["attempts"]) == ({}, {})
    assert await fleet.members[1].version() == steps
    assert (await fleet.members[1].stats())["generated_tokens"] > 0
    await asyncio.gather(generation.close(), *(member.end() for member in fleet.members))
