"""The plain queue against a model of it, under random interleavings of calls, cancellations and deadlines."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import RunError
from tidemill.protocols import Delivery, Lease
from tidemill.queue.message_queue import NO_LEASE, MessageQueue
from tidemill.records import GroupHeader

BOUND = 2
STEPS = st.tuples(
    st.sampled_from(
        ["put", "put", "put", "offer", "lease", "lease", "acknowledge", "release", "cancel", "tick", "newer"]
    ),
    st.integers(1, 3),
)


@dataclass
class Account:
    """Counts from outside where every group went."""

    queue: MessageQueue[Any]
    version: int = 0
    offered: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # dropped or swept
    open: dict[int, list[int]] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    released: int = 0
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def put(self, count: int) -> None:
        uids = range(len(self.offered), len(self.offered) + count)
        self.offered += uids
        groups = [Delivery(GroupHeader(uid, self.version, self.version, 1, 1), uid) for uid in uids]
        self.gone += await self.queue.put(groups, 60)
        self.stored += uids

    async def offer(self, counts: list[int]) -> None:
        batches = []
        for count in counts:
            uids = range(len(self.offered), len(self.offered) + count)
            self.offered += uids
            batches.append([Delivery(GroupHeader(uid, self.version, self.version, 1, 1), uid) for uid in uids])
        crowded = bool(self.queue.producers)
        answers = await self.queue.offer(batches)
        assert not crowded or answers == [None] * len(counts)  # no waiting producer is overtaken
        assert None not in answers or set(answers[answers.index(None) :]) == {None}
        for batch, dropped in zip(batches, answers, strict=True):
            self.gone += dropped or ()
            self.stored += [delivery.payload for delivery in batch] if dropped is not None else ()

    async def lease(self, count: int) -> None:
        version = self.version
        lease = await self.queue.lease(count, version, 60)
        self.gone += lease.swept
        assert all(version - d.header.oldest_version <= BOUND for d in lease.deliveries)
        self.open |= {lease.lease_id: [d.payload for d in lease.deliveries]} if lease.lease_id != NO_LEASE else {}

    async def step(self, action: str, number: int) -> None:
        if action == "put":
            self.tasks.append(asyncio.create_task(self.put(number)))
        elif action == "offer":
            await self.offer([number, 1])
        elif action == "lease":
            self.tasks.append(asyncio.create_task(self.lease(number)))
        elif action == "cancel" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
        elif action == "newer":
            self.version += 1
        elif action == "tick":
            await asyncio.sleep(0)
        elif action in ("acknowledge", "release") and self.open:
            lease_id, uids = self.open.popitem()
            await (self.queue.acknowledge(lease_id) if action == "acknowledge" else self.queue.release(lease_id))
            self.trained += uids if action == "acknowledge" else []
            self.released += len(uids) if action == "release" else 0

    async def drain(self) -> None:
        await self.queue.close()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError | RunError), result
        for lease_id in list(self.open):
            await self.queue.release(lease_id)
            del self.open[lease_id]
        lease: Lease[int] = await self.queue.lease(1, 0, 1)
        while lease.deliveries:
            self.trained += [d.payload for d in lease.deliveries]
            lease = await self.queue.lease(1, 0, 1)
        assert lease.ended


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60), st.integers(3, 6), st.sampled_from(["block", "drop_oldest"]))
def test_no_interleaving_loses_or_doubles_a_group(
    steps: list[tuple[str, int]], capacity: int, when_full: Literal["block", "drop_oldest"]
) -> None:
    async def run() -> None:
        account = Account(MessageQueue(capacity, BOUND, when_full))
        for action, number in steps:
            await account.step(action, number)
            assert (await account.queue.stats())["depth"] <= capacity + account.released
        await account.drain()
        assert Counter(account.stored) == Counter(account.trained) + Counter(account.gone)
        assert max(Counter(account.stored).values(), default=1) == 1

    asyncio.run(run())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=40))
def test_without_waiting_the_queue_is_a_plain_list(steps: list[tuple[bool, int]]) -> None:
    async def run() -> None:
        queue: MessageQueue[int] = MessageQueue(6, 0)
        model: list[int] = []
        uid = 0
        for is_put, count in steps:
            if is_put and len(model) + count <= 6:
                await queue.put([Delivery(GroupHeader(uid + i, 0, 0, 1, 1), uid + i) for i in range(count)], 1)
                model, uid = model + list(range(uid, uid + count)), uid + count
            elif not is_put and len(model) >= count:
                lease = await queue.lease(count, 0, 1)
                assert [d.payload for d in lease.deliveries] == model[:count]
                model = model[count:]

    asyncio.run(run())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 4))
def test_nothing_is_swept_that_some_order_trains_in_time(versions: list[int], batch: int) -> None:
    # The k-th group is trained k // batch versions after the first; by version, the largest age is the least possible.
    newest = max(versions)
    bound = max(newest + place // batch - version for place, version in enumerate(sorted(versions)))

    async def run() -> None:
        queue: MessageQueue[int] = MessageQueue(len(versions) + batch, bound)
        await queue.put([Delivery(GroupHeader(uid, v, v, 1, 1), uid) for uid, v in enumerate(versions)], 1)
        await queue.close()
        for now in range(newest, newest + math.ceil(len(versions) / batch)):
            assert (await queue.lease(batch, now, 1)).swept == ()

    asyncio.run(run())


async def test_a_cancellation_in_the_moment_of_waking_takes_nothing() -> None:
    queue: MessageQueue[int] = MessageQueue(2, 0)
    waiting = asyncio.create_task(queue.lease(1, 0, 60))
    await asyncio.sleep(0)
    await queue.put([Delivery(GroupHeader(0, 0, 0, 1, 1), 0)], 1)  # the consumer is woken, but did not run yet
    waiting.cancel()
    assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
    assert (await queue.stats())["depth"] == 1
    assert (await queue.lease(1, 0, 0)).deliveries[0].payload == 0


async def test_a_cancelled_consumer_wakes_the_next_one() -> None:
    queue: MessageQueue[int] = MessageQueue(2, 0)
    first, second = [asyncio.create_task(queue.lease(1, 0, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    await queue.put([Delivery(GroupHeader(0, 0, 0, 1, 1), 0)], 1)
    first.cancel()
    assert (await asyncio.wait_for(second, 60)).deliveries[0].payload == 0


def test_importing_the_queue_does_not_import_ray() -> None:
    code = "import sys, tidemill.queue.message_queue; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
