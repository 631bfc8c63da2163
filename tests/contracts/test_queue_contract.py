"""What every `Queue` must do, run against the plain class and against the same queue inside a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tidemill.errors import ConfigError, RunError
from tidemill.protocols import Delivery, Queue
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import GroupHeader

Make = Callable[..., Queue[Any]]
SOON = 120.0  # deadline of what must happen
NOW = 0.2  # deadline of what must not


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(params=["plain", pytest.param("actor", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "actor":
        request.getfixturevalue("local_ray")
        from tidemill.actors.queue import start_queue
    start = MessageQueue if request.param == "plain" else start_queue
    return lambda capacity=4, max_staleness=1, when_full="block": start(capacity, max_staleness, when_full)


def delivery(uid: int, version: int = 0, usable: int | None = None) -> Delivery[bytes]:
    header = GroupHeader(uid, version, version if usable is None else usable, 10, 100)
    return Delivery(header, f"group {uid}".encode())


def deliveries(*uids: int) -> list[Delivery[bytes]]:
    return [delivery(uid) for uid in uids]


def uids(groups: Any) -> list[int]:
    return [group.header.uid for group in groups]


async def test_a_lease_takes_the_first_arrivals_and_orders_them_by_uid(make: Make) -> None:
    queue = make()
    await queue.put(deliveries(9, 2), SOON)
    await queue.put(deliveries(5, 1), SOON)
    first = await queue.lease(3, 0, SOON)
    assert uids(first.deliveries) == [2, 5, 9]
    assert [bytes(group.payload) for group in first.deliveries] == [b"group 2", b"group 5", b"group 9"]
    assert uids((await queue.lease(1, 0, SOON)).deliveries) == [1]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_000])
async def test_payloads_come_out_as_they_were_put_however_they_are_mixed(make: Make, nbytes: int) -> None:
    queue = make(capacity=32)
    sent = {uid: bytes([uid]) * (nbytes * (uid % 3)) for uid in range(32)}
    groups = [Delivery(GroupHeader(uid, 0, 0, 1, len(payload)), payload) for uid, payload in sent.items()]
    await asyncio.gather(*(queue.put(groups[n : n + 2], SOON) for n in range(0, 32, 2)))
    received: dict[int, bytes] = {}
    for count in (1, 15, 16):
        lease = await queue.lease(count, 0, SOON)
        received |= {group.header.uid: bytes(group.payload) for group in lease.deliveries}
        await queue.acknowledge(lease.lease_id)
    assert received == sent


async def test_a_lease_takes_the_oldest_version_first_and_then_the_first_arrival(make: Make) -> None:
    queue = make()
    await queue.put([delivery(0, 5), delivery(1, 4), delivery(2, 5), delivery(3, 4)], SOON)
    assert uids((await queue.lease(1, 5, SOON)).deliveries) == [1]
    assert uids((await queue.lease(2, 5, SOON)).deliveries) == [0, 3]
    assert uids((await queue.lease(1, 6, SOON)).deliveries) == [2]


async def test_a_group_of_use_longer_than_its_oldest_token_is_swept_later_and_taken_no_later(make: Make) -> None:
    """Its tokens become too old one after the other."""
    queue = make(max_staleness=1)
    await queue.put([delivery(0, 5), delivery(1, 4, usable=6), delivery(2, 4)], SOON)
    lease = await queue.lease(1, 6, SOON)
    assert (lease.swept, uids(lease.deliveries)) == ((2,), [1])
    await queue.release(lease.lease_id)
    lease = await queue.lease(1, 7, SOON)
    assert (lease.swept, uids(lease.deliveries)) == ((0,), [1])


async def test_a_put_without_room_times_out_and_stores_nothing(make: Make) -> None:
    queue = make(capacity=3)
    await queue.put(deliveries(0, 1), SOON)
    with pytest.raises(TimeoutError, match="no room for 2 groups within"):
        await queue.put(deliveries(2, 3), NOW)
    await queue.close()
    assert uids((await queue.lease(3, 0, SOON)).deliveries) == [0, 1]


async def test_a_lease_without_enough_groups_times_out_and_takes_nothing(make: Make) -> None:
    queue = make()
    await queue.put(deliveries(0, 1), SOON)
    with pytest.raises(TimeoutError, match="no 3 groups at version 0 within"):
        await queue.lease(3, 0, NOW)
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [0, 1]


async def test_a_lease_makes_room_for_a_waiting_producer(make: Make) -> None:
    queue = make(capacity=2)
    await queue.put(deliveries(0, 1), SOON)
    waiting = asyncio.create_task(queue.put(deliveries(2, 3), SOON))
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [0, 1]
    assert await waiting == []
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [2, 3]


async def test_sixteen_producers_fill_the_queue_and_nothing_is_lost(make: Make) -> None:
    queue = make(capacity=8)
    producers = [asyncio.create_task(produce(queue, range(start, 160, 16))) for start in range(16)]
    seen: list[int] = []
    while len(seen) < 160:
        lease = await queue.lease(4, 0, SOON)
        seen += uids(lease.deliveries)
        await queue.acknowledge(lease.lease_id)
        assert (await queue.stats())["depth"] <= 8
    await asyncio.gather(*producers)
    assert sorted(seen) == list(range(160))


async def produce(queue: Queue[Any], numbers: range) -> None:
    for uid in numbers:
        assert await queue.put([delivery(uid)], SOON) == []


async def test_a_full_queue_holds_up_its_producers_and_nothing_else(make: Make) -> None:
    queue = make(capacity=1)
    await queue.put(deliveries(0), SOON)
    waiting = [asyncio.create_task(queue.put(deliveries(uid), SOON)) for uid in range(1, 17)]
    await asyncio.sleep(NOW)
    assert (await queue.stats())["depth"] == 1
    assert not any(task.done() for task in waiting)
    await queue.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_close_displaces_nothing_from_a_full_queue(make: Make) -> None:
    queue = make(capacity=4)
    await queue.put(deliveries(0, 1, 2, 3), SOON)
    waiting = [asyncio.create_task(queue.put(deliveries(uid), SOON)) for uid in range(4, 20)]
    await asyncio.sleep(NOW)
    await queue.close()
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(failure) for failure in failures] == [RunError] * 16
    lease = await queue.lease(4, 0, SOON)
    assert (uids(lease.deliveries), lease.ended) == ([0, 1, 2, 3], True)


async def test_close_gives_a_waiting_consumer_what_is_left(make: Make) -> None:
    queue = make()
    await queue.put(deliveries(0), SOON)
    waiting = asyncio.create_task(queue.lease(3, 0, SOON))
    await asyncio.sleep(NOW)
    await queue.close()
    lease = await waiting
    assert (uids(lease.deliveries), lease.ended) == ([0], True)


async def test_a_closed_queue_ends_only_with_its_last_group(make: Make) -> None:
    queue = make()
    await queue.put(deliveries(0, 1, 2), SOON)
    await queue.close()
    await queue.close()
    first, second, third = [await queue.lease(2, 0, SOON) for _ in range(3)]
    assert (uids(first.deliveries), first.ended) == ([0, 1], False)
    assert (uids(second.deliveries), second.ended) == ([2], True)
    assert (third.deliveries, third.ended) == ((), True)
    await queue.release(first.lease_id)
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [0, 1]


async def test_a_closed_queue_refuses_groups(make: Make) -> None:
    queue = make()
    await queue.close()
    with pytest.raises(RunError, match="closed"):
        await queue.put(deliveries(0), SOON)


async def test_drop_oldest_counts_and_names_what_it_dropped(make: Make) -> None:
    queue = make(capacity=3, when_full="drop_oldest")
    await queue.put(deliveries(7, 8, 9), SOON)
    assert await queue.put(deliveries(1, 2), SOON) == [7, 8]
    assert (await queue.stats())["dropped"] == 2
    assert uids((await queue.lease(3, 0, SOON)).deliveries) == [1, 2, 9]


async def test_drop_oldest_never_evicts_leased_groups(make: Make) -> None:
    queue = make(capacity=2, when_full="drop_oldest")
    await queue.put(deliveries(0, 1), SOON)
    lease = await queue.lease(2, 0, SOON)
    assert await queue.put(deliveries(2, 3), SOON) == []
    assert await queue.put(deliveries(4), SOON) == [2]
    await queue.release(lease.lease_id)
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [0, 1]


async def test_released_groups_return_to_the_head_in_order_of_arrival(make: Make) -> None:
    queue = make(capacity=6)
    await queue.put(deliveries(5, 4, 3, 2, 1), SOON)
    first, second = await queue.lease(2, 0, SOON), await queue.lease(2, 0, SOON)
    await queue.release(first.lease_id)
    await queue.release(second.lease_id)
    order = [uids((await queue.lease(1, 0, SOON)).deliveries)[0] for _ in range(5)]
    assert order == [5, 4, 3, 2, 1]


async def test_a_release_wakes_a_waiting_consumer(make: Make) -> None:
    queue = make()
    await queue.put(deliveries(0, 1), SOON)
    lease = await queue.lease(2, 0, SOON)
    waiting = asyncio.create_task(queue.lease(2, 0, SOON))
    await asyncio.sleep(NOW)
    await queue.release(lease.lease_id)
    assert uids((await waiting).deliveries) == [0, 1]


@pytest.mark.parametrize("method", ["acknowledge", "release"])
async def test_a_lease_is_settled_once(make: Make, method: str) -> None:
    queue = make()
    await queue.put(deliveries(0), SOON)
    lease = await queue.lease(1, 0, SOON)
    await queue.acknowledge(lease.lease_id)
    settle = {"acknowledge": queue.acknowledge, "release": queue.release}[method]
    with pytest.raises(RunError, match=f"lease {lease.lease_id} is not open"):
        await settle(lease.lease_id)


async def test_groups_beyond_the_bound_are_swept_whole_and_named(make: Make) -> None:
    queue = make(max_staleness=1)
    await queue.put([delivery(0, 3), delivery(1, 4), delivery(2, 2), delivery(3, 5)], SOON)
    lease = await queue.lease(2, 5, SOON)
    assert (uids(lease.deliveries), lease.swept) == ([1, 3], (0, 2))
    assert (await queue.stats())["swept"] == 2


async def test_a_lease_that_swept_and_cannot_be_filled_returns_at_once(make: Make) -> None:
    queue = make(max_staleness=0)
    await queue.put([delivery(0, 1), delivery(1, 2)], SOON)
    lease = await queue.lease(2, 2, SOON)
    assert (lease.deliveries, lease.swept, lease.ended) == ((), (0,), False)
    await queue.put([delivery(0, 2)], SOON)
    assert uids((await queue.lease(2, 2, SOON)).deliveries) == [0, 1]


async def test_a_stale_arrival_wakes_a_waiting_consumer(make: Make) -> None:
    queue = make(max_staleness=0)
    waiting = asyncio.create_task(queue.lease(2, 3, SOON))
    await asyncio.sleep(NOW)
    await queue.put([delivery(0, 2)], SOON)
    assert (await waiting).swept == (0,)


async def test_sweeping_makes_room_for_a_waiting_producer(make: Make) -> None:
    queue = make(capacity=2, max_staleness=0)
    await queue.put(deliveries(0, 1), SOON)
    waiting = asyncio.create_task(queue.put([delivery(2, 1)], SOON))
    assert (await queue.lease(1, 1, SOON)).swept == (0, 1)
    await waiting
    assert uids((await queue.lease(1, 1, SOON)).deliveries) == [2]


async def test_a_cancelled_lease_loses_no_group(make: Make) -> None:
    queue = make()
    for pause in (0.0, 0.001, 0.002, 0.004, 0.05):
        await queue.put(deliveries(0), SOON)
        waiting = asyncio.create_task(queue.lease(2, 0, SOON))
        putting = asyncio.create_task(queue.put(deliveries(1), SOON))
        await asyncio.sleep(pause)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await queue.release((await waiting).lease_id)
        await putting
        lease = await queue.lease(2, 0, SOON)
        assert uids(lease.deliveries) == [0, 1]
        await queue.acknowledge(lease.lease_id)


async def test_a_cancelled_lease_loses_no_swept_uid(make: Make) -> None:
    queue = make(max_staleness=0)
    for pause in (0.0, 0.001, 0.002, 0.004, 0.05):
        await queue.put(deliveries(0), SOON)
        waiting = asyncio.create_task(queue.lease(2, 5, SOON))
        await asyncio.sleep(pause)
        waiting.cancel()
        swept: tuple[int, ...] = ()
        with suppress(asyncio.CancelledError):
            swept = (await waiting).swept
        await queue.put([delivery(1, 5)], SOON)
        lease = await queue.lease(1, 5, SOON)
        assert swept + lease.swept == (0,)
        await queue.acknowledge(lease.lease_id)


async def test_a_cancelled_put_does_not_hold_up_the_next(make: Make) -> None:
    queue = make(capacity=2)
    await queue.put(deliveries(0), SOON)
    waiting = [asyncio.create_task(queue.put(deliveries(uid, uid + 1), SOON)) for uid in (1, 3)]
    await asyncio.sleep(NOW)
    waiting[0].cancel()
    assert isinstance((await asyncio.gather(waiting[0], return_exceptions=True))[0], asyncio.CancelledError)
    assert uids((await queue.lease(1, 0, SOON)).deliveries) == [0]
    await waiting[1]
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [3, 4]


async def test_producers_are_served_in_the_order_in_which_they_came(make: Make) -> None:
    queue = make(capacity=2)
    await queue.put(deliveries(0, 1), SOON)
    waiting = []
    for batch in [(2, 3), (4,), (5,)]:
        waiting.append(asyncio.create_task(queue.put(deliveries(*batch), SOON)))
        await asyncio.sleep(NOW)
    arrivals = [uids((await queue.lease(1, 0, SOON)).deliveries)[0] for _ in range(6)]
    await asyncio.gather(*waiting)
    assert arrivals == [0, 1, 2, 3, 4, 5]


async def test_a_small_put_does_not_overtake_a_large_one_that_waits(make: Make) -> None:
    queue = make(capacity=2)
    await queue.put(deliveries(0), SOON)
    large = asyncio.create_task(queue.put(deliveries(1, 2), SOON))
    await asyncio.sleep(NOW)
    with pytest.raises(TimeoutError):
        await queue.put(deliveries(3), NOW)
    assert uids((await queue.lease(1, 0, SOON)).deliveries) == [0]
    assert await large == []


async def test_batches_that_can_never_fit_are_refused(make: Make) -> None:
    queue = make(capacity=2)
    with pytest.raises(RunError, match="capacity 2"):
        await queue.put(deliveries(0, 1, 2), SOON)
    for count in (0, 3):
        with pytest.raises(RunError, match="capacity 2"):
            await queue.lease(count, 0, SOON)


async def test_stats_account_for_every_group(make: Make) -> None:
    queue = make(capacity=3, max_staleness=1, when_full="drop_oldest")
    await queue.put([delivery(uid, uid) for uid in range(3)], SOON)
    await queue.put([delivery(3, 3)], SOON)
    lease = await queue.lease(1, 3, SOON)
    await queue.acknowledge(lease.lease_id)
    await queue.put([delivery(4, 2), delivery(5, 3)], SOON)
    await queue.lease(1, 3, SOON)
    assert dict(await queue.stats()) == {
        "depth": 2, "leased": 1, "capacity": 3, "put": 6, "trained": 1, "dropped": 1, "swept": 1, "oldest_version": 3,
    }  # fmt: skip


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue\.capacity = 0"):
        MessageQueue(0, 1)
