"""`RemoteQueue` and `QueueActor` in one process, with calls that take a random time: what batching must not break."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.actors.queue import QueueActor, RemoteQueue
from tidemill.errors import RunError
from tidemill.protocols import Delivery
from tidemill.queue.message_queue import NO_LEASE
from tidemill.records import GroupHeader

pytestmark = pytest.mark.own_time

SOON = 20.0


@dataclass
class Method:
    """A method of an actor's handle: calls start in order, last a while, and outlive a caller that is cancelled."""

    handle: Handle
    name: str

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        self.handle.calls.append(self.name)
        return asyncio.shield(asyncio.create_task(self.run(*arguments)))

    async def run(self, *arguments: Any) -> Any:
        result = await getattr(self.handle.actor, self.name)(*arguments)
        for _ in range(self.handle.random.randrange(4)):
            await asyncio.sleep(0)
        return result


@dataclass
class Handle:
    """Stands for the handle of a QueueActor."""

    actor: QueueActor
    random: random.Random = field(default_factory=lambda: random.Random(0))
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


async def start(capacity: int, when_full: Literal["block", "drop_oldest"] = "block", seed: int = 0) -> RemoteQueue:
    handle = Handle(QueueActor(capacity, 1000, when_full), random.Random(seed))
    await handle.actor.start()
    return RemoteQueue(handle)


def group(uid: int) -> Delivery[bytes]:
    return Delivery(GroupHeader(uid, 0, 0, 1, 1), b"%d" % uid)


def uids(groups: Any) -> list[int]:
    return [group.header.uid for group in groups]


async def test_puts_that_come_at_once_are_one_call() -> None:
    queue = await start(16)
    assert await asyncio.gather(*(queue.put([group(uid)], SOON) for uid in range(16))) == [[]] * 16
    assert queue.actor.calls == ["offer"]


async def test_puts_without_room_wait_in_the_order_in_which_they_came() -> None:
    queue = await start(2)
    puts = [asyncio.create_task(queue.put([group(uid)], SOON)) for uid in range(4)]
    await asyncio.sleep(0.01)
    puts += [asyncio.create_task(queue.put([group(uid)], SOON)) for uid in range(4, 8)]
    order: list[int] = []
    while len(order) < 8:
        lease = await queue.lease(1, 0, SOON)
        order += uids(lease.deliveries)
        await queue.acknowledge(lease.lease_id)
    await asyncio.gather(*puts)
    assert order == list(range(8))


async def test_a_put_that_found_no_room_is_not_overtaken_by_the_next_offer() -> None:
    queue = await start(2)
    actor, offer, later = queue.actor.actor, queue.actor.actor.offer, []

    async def offer_and_make_room(batches: Any) -> Any:
        answers = await offer(batches)
        if not later:
            later.extend(asyncio.create_task(queue.put([group(uid)], SOON)) for uid in (4, 5))
            await asyncio.sleep(0)
            await actor.lease(2, 0, SOON)
        return answers

    actor.offer = offer_and_make_room
    puts = [asyncio.create_task(queue.put([group(uid)], SOON)) for uid in range(4)]
    await asyncio.gather(*puts)
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [2, 3]
    await asyncio.gather(*later)


async def test_an_error_of_the_call_reaches_every_put_of_it() -> None:
    queue = await start(4)

    async def fail(_: Any) -> Any:
        raise RunError("the message queue died")

    queue.actor.actor.offer = fail
    results = await asyncio.gather(*(queue.put([group(uid)], SOON) for uid in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["the message queue died"] * 3


async def test_what_was_dropped_for_a_cancelled_put_is_named_by_the_next_lease() -> None:
    queue = await start(1, "drop_oldest")
    await queue.put([group(7)], SOON)
    put = asyncio.create_task(queue.put([group(8)], SOON))
    while queue.actor.calls.count("offer") < 2:
        await asyncio.sleep(0)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    lease = await queue.lease(1, 0, SOON)
    while not lease.swept:
        await queue.release(lease.lease_id)
        lease = await queue.lease(1, 0, SOON)
    assert (lease.swept, uids(lease.deliveries)) == ((7,), [8])
    await queue.release(lease.lease_id)
    assert (await queue.lease(1, 0, SOON)).swept == ()  # once: nobody may issue it twice


async def test_a_call_that_comes_when_it_was_taken_back_already_does_nothing() -> None:
    actor = QueueActor(2, 1, "block")
    await actor.start()
    await actor.withdraw("a ticket")
    with pytest.raises(RunError, match="put was withdrawn"):
        await actor.wait("a ticket", "put", [group(1)], SOON)
    assert (await actor.stats())["put"] == 0


async def test_groups_of_a_lease_that_is_taken_back_return_to_the_queue() -> None:
    actor = QueueActor(2, 1, "block")
    await actor.put([group(1)], SOON)
    await actor.wait("a ticket", "lease", 1, 0, SOON)
    await actor.withdraw("a ticket")
    assert uids((await actor.lease(1, 0, SOON)).deliveries) == [1]


async def test_what_was_swept_for_a_lease_that_is_taken_back_is_named_by_the_next_one() -> None:
    actor = QueueActor(2, 1, "block")
    await actor.put([group(1)], SOON)
    assert (await actor.wait("a ticket", "lease", 1, 2, SOON)).swept == (1,)
    await actor.withdraw("a ticket")
    assert (await actor.lease(1, 2, SOON)).swept == (1,)


async def test_a_put_that_is_cancelled_in_line_is_not_sent() -> None:
    queue = await start(4)
    puts = [asyncio.create_task(queue.put([group(uid)], SOON)) for uid in range(3)]
    await asyncio.sleep(0)
    puts[1].cancel()
    await asyncio.gather(*puts, return_exceptions=True)
    assert uids((await queue.lease(2, 0, SOON)).deliveries) == [0, 2]
    assert (await queue.stats())["put"] == 2


async def test_a_copy_in_another_process_starts_with_an_empty_line() -> None:
    queue = RemoteQueue("a handle")
    queue.line.append(object())
    other = copy.copy(queue)  # through the same method as pickling
    assert (other.actor, other.line) == ("a handle", [])


@dataclass
class Account:
    """Where every group went, seen from outside; a put that was cancelled may have been stored."""

    queue: RemoteQueue
    offered: int = 0
    stored: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def put(self, count: int) -> None:
        groups = [group(uid) for uid in range(self.offered, self.offered + count)]
        self.offered += count
        self.gone += await self.queue.put(groups, SOON)
        self.stored += uids(groups)

    async def lease(self, count: int, *, train: bool) -> None:
        lease = await self.queue.lease(count, 0, SOON)
        self.gone += lease.swept
        if lease.lease_id != NO_LEASE and train:
            self.trained += uids(lease.deliveries)
            await asyncio.shield(self.queue.acknowledge(lease.lease_id))
        elif lease.lease_id != NO_LEASE:
            await asyncio.shield(self.queue.release(lease.lease_id))

    async def step(self, action: str, number: int) -> None:
        if action == "put":
            self.tasks.append(asyncio.create_task(self.put(number)))
        elif action == "cancel" and self.tasks:
            self.tasks[-number % len(self.tasks)].cancel()
        elif action == "tick":
            await asyncio.sleep(0)
        elif action in ("train", "release"):
            self.tasks.append(asyncio.create_task(self.lease(number, train=action == "train")))

    async def drain(self) -> None:
        await self.queue.close()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError | RunError), result
        if self.queue.offering:
            await self.queue.offering
        await asyncio.sleep(0.001)  # calls that outlived their callers
        ended = False
        while not ended:
            lease = await self.queue.lease(1, 0, SOON)
            self.trained += uids(lease.deliveries)
            self.gone += lease.swept
            ended = lease.ended


STEPS = st.tuples(st.sampled_from(["put", "put", "put", "train", "release", "cancel", "tick"]), st.integers(1, 3))


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=50), st.integers(3, 6), st.sampled_from(["block", "drop_oldest"]), st.integers(0, 99))
def test_no_interleaving_loses_or_doubles_a_group(
    steps: list[tuple[str, int]], capacity: int, when_full: Literal["block", "drop_oldest"], seed: int
) -> None:
    async def run() -> None:
        account = Account(await start(capacity, when_full, seed))
        for action, number in steps:
            await account.step(action, number)
        await account.drain()
        ends = Counter(account.trained) + Counter(account.gone)
        assert Counter(account.stored) <= ends <= Counter(range(account.offered))

    asyncio.run(run())
