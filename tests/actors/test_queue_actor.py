"""What only the queue inside a Ray actor must do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tidemill.actors.queue import start_queue
from tidemill.errors import RunError
from tidemill.protocols import Delivery
from tidemill.records import GroupHeader

pytestmark = pytest.mark.slow
SOON = 120.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def group(uid: int, nbytes: int) -> Delivery[bytes]:
    return Delivery(GroupHeader(uid, 0, 0, 1, nbytes), bytes([uid]) * nbytes)


async def test_groups_that_are_put_at_once_pass_the_queue_as_one_unopened_object() -> None:
    import ray

    queue = start_queue(16, 1, "block")
    await asyncio.gather(*(queue.put([group(uid, 100_000)], SOON) for uid in range(16)))
    lease = await queue.wait("a lease", "lease", SOON, 16, 0)
    boxes = {delivery.payload.box for delivery in lease.deliveries}
    assert [type(box) for box in boxes] == [ray.ObjectRef]
    await queue.release(lease.lease_id)
    views = [delivery.payload for delivery in (await queue.lease(16, 0, SOON)).deliveries]
    assert not any(view.flags.owndata or view.flags.writeable for view in views)
    assert all((view == uid).all() for uid, view in enumerate(views))


async def test_a_box_is_freed_when_the_last_of_its_groups_is_trained() -> None:
    queue = start_queue(4, 1, "block")
    before = await references()
    await asyncio.gather(*(queue.put([group(uid, 100_000)], SOON) for uid in range(4)))
    await until_kept(before, 1)
    for last in (False, False, False, True):
        lease = await queue.lease(1, 0, SOON)
        await queue.acknowledge(lease.lease_id)
        del lease
        await until_kept(before, 0 if last else 1)


async def references() -> set[bytes]:
    """Objects that this process keeps, after what is being given back has been."""
    import ray

    await asyncio.sleep(0.5)
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


async def until_kept(before: set[bytes], number: int) -> None:
    """Wait until the process keeps so many objects more, since it gives them back beside us."""
    async with asyncio.timeout(SOON):
        while len(await references() - before) != number:
            pass


async def test_control_calls_pass_a_crowd_of_waiters() -> None:
    queue = start_queue(1, 1, "block", max_waiting=2)
    waiting = [asyncio.create_task(queue.put([group(i, 1)], SOON)) for i in range(12)]
    while (await asyncio.wait_for(queue.stats(), SOON))["depth"] < 1:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(queue.close(), SOON)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results].count(RunError) == 11


async def test_the_death_of_the_actor_is_a_run_error() -> None:
    import ray

    queue = start_queue(1, 1, "block")
    waiting = asyncio.create_task(queue.lease(1, 0, 2 * SOON))
    await queue.stats()
    ray.kill(queue.actor)
    with pytest.raises(RunError, match="message queue died"):
        await asyncio.wait_for(waiting, SOON)


async def test_an_error_of_the_queue_keeps_its_type_and_remote_traceback() -> None:
    queue = start_queue(1, 1, "block")
    with pytest.raises(RunError, match="lease 5 is not open") as caught:
        await queue.release(5)
    assert type(caught.value) is RunError
    assert "in forget" in str(caught.value.__cause__)
