"""Engines in processes of their own that are killed, and replaced."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tidemill.actors.engine import EngineActor, RemoteEngine, engine_shell
from tidemill.errors import EngineLostError
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import Sampling
from tidemill.records import Float32Array, Int32Array
from tidemill.rollout.fleet import Fleet
from tidemill.sections import SyncConfig
from tidemill.sync.outbox import MemoryOutbox
from tidemill.sync.synchronizer import Synchronizer

pytestmark = pytest.mark.slow
CANARY = np.arange(6, dtype=np.int32)
DEADLINE_S = 120.0


class FakeActor(EngineActor):
    """The shell of an engine around a fake one, with a process of its own below, as vLLM has."""

    def __init__(self) -> None:
        import subprocess

        self.receiver = None
        self.engine = FakeEngine(faults={7: Fault("hang")})
        self.child = subprocess.Popen(["sleep", "600"])

    async def start(self) -> None:
        pass

    async def processes(self) -> list[int]:
        return [os.getpid(), self.child.pid]


class Pool:
    """The rotation of a rollouter, which only remembers."""

    def __init__(self) -> None:
        self.joined: dict[str, int] = {}
        self.removed: list[str] = []

    async def add_engine(self, name: str, engine: RemoteEngine) -> None:
        self.joined[name] = await engine.version()

    async def remove_engine(self, name: str, reason: str, patience_s: float = 0.0) -> int:
        self.removed.append(name)
        return 0

    async def lost_engines(self) -> dict[str, str]:
        return {}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")  # as `cluster.local` does
    here = {"env_vars": {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}}
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


def start(number: int) -> RemoteEngine:
    return RemoteEngine(f"engine {number}", engine_shell(FakeActor, 0, {}).remote())


async def uniform(tokens: Int32Array) -> Float32Array:
    return np.full(len(tokens) - 1, -math.log(64), dtype=np.float32)


async def export(path: Path) -> int:
    return path.write_bytes(b"weights")


@asynccontextmanager
async def fleet_of(folder: Path, engines: list[RemoteEngine], pool: Pool) -> AsyncIterator[Fleet]:
    synchronizer = Synchronizer(engines, SyncConfig(), MemoryOutbox(folder / "shm", export), uniform, CANARY)
    fleet = Fleet(engines, start, DEADLINE_S, pool, synchronizer, lambda text: None)
    await asyncio.gather(*(engine.start() for engine in engines))
    async with asyncio.timeout(DEADLINE_S), fleet.kept():
        await fleet.publish(4, "keep")
        yield fleet
    await asyncio.gather(*(member.end() for member in fleet.members))


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_killed_or_stopped_is_replaced_and_nothing_is_left_of_it(
    tmp_path: Path, death: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.rollout.fleet.PROBE_TIMEOUT_S", 3.0)
    monkeypatch.setattr("tidemill.actors.engine.ORDERLY_END_S", 3.0)
    engines, pool = [start(0), start(1)], Pool()
    async with fleet_of(tmp_path, engines, pool) as fleet:
        [pid, child] = await engines[0].actor.processes.remote()
        request = asyncio.create_task(engines[0].generate("7.0", CANARY, Sampling(1, 3, 1.0)))
        await asyncio.sleep(0.1)
        os.kill(pid, death)
        with pytest.raises(EngineLostError, match="engine 0 died"):
            await request
        while not pool.joined:
            await asyncio.sleep(0.05)
        assert (pool.removed, pool.joined) == (["engine 0"], {"engine 2": 4})
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
    engines, pool = [start(0), start(1)], Pool()
    async with fleet_of(tmp_path, engines, pool) as fleet:
        [pid, _] = await engines[0].actor.processes.remote()
        os.kill(pid, signal.SIGKILL)
        await fleet.publish(5, "keep")
        assert await engines[1].version() == 5
        while not pool.joined:
            await asyncio.sleep(0.05)
        assert pool.joined == {"engine 2": 5}
