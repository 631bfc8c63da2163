"""The message queue in a process of its own.

The actor holds headers and references. Payloads stay in Ray's object store, and groups that are put at once share one
object there:

    put, put, put ─► pack ─► Boxed(box, 0), Boxed(box, 1), Boxed(box, 2) ─► the queue ─► lease ─► unpack ─► views
                      └────► one object: [array, array, array] ─────────────────────────────────────┘

An object of any size costs a millisecond, so one object for every group would take most of the time of a put. A
box stays in memory until the last of its groups was trained or dropped. They were put within milliseconds, and none may
wait for longer than `max_staleness` versions, so a box lives no longer than a group may.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import numpy as np
import ray

from tidemill.actors.call import CONTROL_TIMEOUT_S, call
from tidemill.actors.placement import ANYWHERE, Placement
from tidemill.errors import RunError
from tidemill.protocols import Delivery, Lease
from tidemill.queue.message_queue import NO_LEASE, MessageQueue, WhenFull
from tidemill.records import Buffer

P = ParamSpec("P")
T = TypeVar("T")
NAME = "the message queue"
PACKER = "the process that put a group into the queue"
INLINE_BYTES = 32_000  # of a batch that is sent as it is: below it Ray itself sends an object inside the call
CONTROL = "control"  # Ray concurrency group of the calls that never wait
WITHDRAW_TIMEOUT_S = 10.0
ANSWERS_KEPT = 1000  # of the latest calls, so that one can be withdrawn
OFFER_BYTES = 16_000_000  # of groups in one call; copying more would hold up the producers' event loop


@dataclass(frozen=True, slots=True)
class Boxed:
    """A payload in Ray's object store."""

    box: Any  # ObjectRef of a list of uint8 arrays
    index: int


def pack(payloads: Sequence[Buffer]) -> list[Buffer | Boxed]:
    """Put payloads into the object store, all as one object; a few bytes stay as they are."""
    if sum(map(len, payloads)) <= INLINE_BYTES:
        return list(payloads)
    box = ray.put([np.frombuffer(payload, np.uint8) for payload in payloads])
    return [Boxed(box, index) for index in range(len(payloads))]


async def unpack(payloads: Sequence[Buffer | Boxed]) -> list[Buffer]:
    """The packed payloads, as read-only views of the object store; every box is fetched once."""
    boxes = list({payload.box: None for payload in payloads if isinstance(payload, Boxed)})
    contents = dict(zip(boxes, await asyncio.gather(*(call(PACKER, box) for box in boxes)), strict=True))
    return [contents[payload.box][payload.index] if isinstance(payload, Boxed) else payload for payload in payloads]


class QueueActor(MessageQueue[Any]):
    """A MessageQueue in a Ray actor, which can withdraw a call whose caller was cancelled.

    Ray runs every concurrency group in an event loop and thread of its own. Calls that wait run in the default group;
    the others arrive through the group `control`, which waiting calls cannot fill, and continue in the loop of the
    default group, which owns all state. A caller names each waiting call by a ticket. Ray's own cancellation is not
    used: a lease that is just being answered would be reported as cancelled, and its groups would be lost.
    """

    def __init__(self, capacity: int, max_staleness: int, when_full: WhenFull) -> None:
        super().__init__(capacity, max_staleness, when_full)
        self.home: Future[asyncio.AbstractEventLoop] = Future()
        self.waiting: dict[str, asyncio.Task[Any] | None] = {}
        self.withdrawn: set[str] = set()  # tickets that were withdrawn before their call arrived
        self.answered: deque[tuple[str, int, Sequence[int]]] = deque(maxlen=ANSWERS_KEPT)

    async def start(self) -> None:
        """Make the loop of this call the one that owns the state: that of the first call in the default group."""
        if not self.home.done():
            self.home.set_result(asyncio.get_running_loop())

    async def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a call that never waits in the loop of the default group."""
        home = await asyncio.wrap_future(self.home)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(getattr(self, method)(*args, **kwargs), home))

    async def wait(self, ticket: str, method: str, *arguments: Any) -> Any:
        await self.start()
        if ticket in self.withdrawn:
            self.withdrawn.remove(ticket)
            raise RunError(f"{method} was withdrawn")
        self.waiting[ticket] = asyncio.current_task()
        try:
            result = await getattr(self, method)(*arguments)
        except asyncio.CancelledError:
            raise RunError(f"{method} was withdrawn") from None
        finally:
            del self.waiting[ticket]
        lease_id, removed = (result.lease_id, result.swept) if isinstance(result, Lease) else (NO_LEASE, result)
        self.answered.append((ticket, lease_id, removed))
        return result

    async def report(self, removed: Sequence[int]) -> None:
        """These uids were removed for a put whose caller is gone: the next lease names them."""
        self.unreported += tuple(removed)
        self.wake()

    async def withdraw(self, ticket: str) -> None:
        """The caller is gone: stop waiting, or return the groups of its lease to the queue."""
        if ticket in self.waiting:
            task = self.waiting[ticket]
            assert task is not None
            task.cancel()
            return
        answers = [(lease_id, removed) for name, lease_id, removed in self.answered if name == ticket]
        if not answers:
            self.withdrawn.add(ticket)
        for lease_id, removed in answers:
            self.unreported += tuple(removed)
            if lease_id in self.leases:
                await self.release(lease_id)


@dataclass(slots=True)
class Put:
    """A put that waits to be offered; its answer is None when the queue had no room for it just then."""

    deliveries: list[Delivery[Any]]
    answer: asyncio.Future[list[int] | None]

    @property
    def nbytes(self) -> int:
        return sum(delivery.header.nbytes for delivery in self.deliveries)


def forward_control(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of `RemoteQueue` that calls the method of the same name in the actor, past all calls that wait."""

    @wraps(method)
    async def forwarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = await self.control(method.__name__, *args, **kwargs)
        return answer

    return forwarded


class RemoteQueue:
    """A MessageQueue in another process; implements `Queue` over the handle of a `QueueActor` actor.

    Puts that arrive while another one is under way are offered together, as one object and one call. Those that find
    no room wait one by one in the actor, in the order of their arrival. All calls must come from one event loop; copies
    in other processes are other producers.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.line: list[Put] = []
        self.offering: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[RemoteQueue], tuple[Any]]:
        return RemoteQueue, (self.actor,)

    async def put(self, deliveries: Sequence[Delivery[Buffer]], timeout_s: float) -> list[int]:
        """A put that is cancelled while it is answered may have been stored."""
        put = Put(list(deliveries), asyncio.get_running_loop().create_future())
        self.line.append(put)
        if self.offering is None or self.offering.done():
            self.offering = asyncio.create_task(self.offer_all())
        dropped = await put.answer
        if dropped is None:
            async with self.ticket() as ticket:
                dropped = await self.wait(ticket, "put", timeout_s, put.deliveries)
        return dropped

    async def lease(self, count: int, version: int, timeout_s: float) -> Lease[Buffer]:
        """Groups that were leased to a cancelled call go back to the head."""
        async with self.ticket() as ticket:
            lease: Lease[Any] = await self.wait(ticket, "lease", timeout_s, count, version)
            payloads = await unpack([delivery.payload for delivery in lease.deliveries])
        deliveries = zip(lease.deliveries, payloads, strict=True)
        return replace(lease, deliveries=tuple(Delivery(boxed.header, payload) for boxed, payload in deliveries))

    acknowledge = forward_control(MessageQueue.acknowledge)
    release = forward_control(MessageQueue.release)
    close = forward_control(MessageQueue.close)
    stats = forward_control(MessageQueue.stats)

    async def offer_all(self) -> None:
        """Offer the puts in line until there are none."""
        while self.line:
            await self.offer(self.next_puts())
            await asyncio.sleep(0)  # puts without room wait in the actor now, before all later ones

    def next_puts(self) -> list[Put]:
        """Take the head of the line, not much above `OFFER_BYTES`."""
        puts: list[Put] = []
        while self.line and sum(put.nbytes for put in puts) < OFFER_BYTES:
            puts.append(self.line.pop(0))
        return [put for put in puts if not put.answer.cancelled()]

    async def offer(self, puts: Sequence[Put]) -> None:
        try:
            pack_deliveries(puts)
            answers = await call(NAME, self.actor.offer.remote([put.deliveries for put in puts]))
        except Exception as error:  # noqa: BLE001 - every caller gets it
            for put in puts:
                if not put.answer.cancelled():
                    put.answer.set_exception(error)
            return
        unheard: list[int] = []
        for put, dropped in zip(puts, answers, strict=True):
            if put.answer.cancelled():
                unheard += dropped or ()
            else:
                put.answer.set_result(dropped)
        if unheard:
            await self.control("report", unheard)

    @asynccontextmanager
    async def ticket(self) -> AsyncIterator[str]:
        """Name a call; it is withdrawn if the caller is cancelled before it has used the answer."""
        ticket = uuid4().hex
        try:
            yield ticket
        except asyncio.CancelledError:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self.control("withdraw", ticket)
            raise

    async def wait(self, ticket: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        pending = self.actor.wait.remote(ticket, method, *arguments, timeout_s)
        return await call(NAME, pending, timeout_s + CONTROL_TIMEOUT_S)

    async def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await call(NAME, self.actor.control.options(concurrency_group=CONTROL).remote(method, *args, **kwargs))


def pack_deliveries(puts: Sequence[Put]) -> None:
    """Replace the payloads of these puts by the references that the queue holds."""
    packed = iter(pack([delivery.payload for put in puts for delivery in put.deliveries]))
    for put in puts:
        put.deliveries = [Delivery(delivery.header, next(packed)) for delivery in put.deliveries]


def start_queue(
    capacity: int, max_staleness: int, when_full: WhenFull, placement: Placement = ANYWHERE, max_waiting: int = 1000
) -> RemoteQueue:
    """Start the queue's actor in the Ray cluster that this process is connected to."""
    options = {"max_concurrency": max_waiting, "concurrency_groups": {CONTROL: 16}, **placement.options()}
    shell = ray.remote(**options)(QueueActor)
    actor = shell.remote(capacity, max_staleness, when_full)
    actor.start.remote()
    return RemoteQueue(actor)
