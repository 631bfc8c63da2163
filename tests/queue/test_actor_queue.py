"""What only the queue inside a Ray actor must do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from tidemill.actors.queue import start_queue
from tidemill.errors import RunError
from tidemill.protocols import Delivery
from tidemill.records import GroupHeader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


async def test_payloads_pass_the_queue_as_unopened_references() -> None:
    import ray

    queue = start_queue(4, 1, "block")
    payload = np.arange(1_000_000, dtype=np.int32)
    await queue.put([Delivery(GroupHeader(0, 0, 1, payload.nbytes), ray.put(payload))], 20)
    lease = await queue.lease(1, 0, 20)
    assert isinstance(lease.deliveries[0].payload, ray.ObjectRef)
    assert (await lease.deliveries[0].payload == payload).all()


async def test_control_calls_pass_a_crowd_of_waiters() -> None:
    queue = start_queue(1, 1, "block", max_waiting=2)
    waiting = [asyncio.create_task(queue.put([Delivery(GroupHeader(i, 0, 1, 1), None)], 20)) for i in range(12)]
    while (await asyncio.wait_for(queue.stats(), 5))["depth"] < 1:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(queue.close(), 5)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results].count(RunError) == 11


async def test_the_death_of_the_actor_is_a_run_error() -> None:
    import ray

    queue = start_queue(1, 1, "block")
    waiting = asyncio.create_task(queue.lease(1, 0, 60))
    await queue.stats()
    ray.kill(queue.actor)
    with pytest.raises(RunError, match="message queue died"):
        await asyncio.wait_for(waiting, 30)


async def test_an_error_of_the_queue_keeps_its_type_and_remote_traceback() -> None:
    queue = start_queue(1, 1, "block")
    with pytest.raises(RunError, match="lease 5 is not open") as caught:
        await queue.release(5)
    assert type(caught.value) is RunError
    assert "in forget" in str(caught.value.__cause__)
