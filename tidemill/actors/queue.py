"""The message queue in a process of its own.

Payloads are object references, nested in `Delivery` so that Ray passes them on unopened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray

from tidemill.actors.call import CONTROL_TIMEOUT_S, call
from tidemill.actors.placement import ANYWHERE, Place
from tidemill.errors import RunError
from tidemill.protocols import Delivery, Lease
from tidemill.queue.message_queue import NO_LEASE, MessageQueue, WhenFull

NAME = "the message queue"
CONTROL = "control"  # Ray concurrency group of the calls that never wait
WITHDRAW_TIMEOUT_S = 10.0
ANSWERS_KEPT = 1000  # of latest calls, to be able to take one back


class QueueActor(MessageQueue[Any]):
    """A MessageQueue in a Ray actor, which can take back a call whose caller was cancelled.

    Ray runs every concurrency group in an event loop and thread of its own. Calls that wait run in the default group;
    the others arrive through the group `control`, which waiters cannot fill, and hop over to the default group's
    loop, where all state lives. A caller names each waiting call by a ticket. Ray's own cancellation is not used: a
    lease that is just being answered would be reported as cancelled, and its groups would be lost.
    """

    def __init__(self, capacity: int, max_staleness: int, when_full: WhenFull) -> None:
        super().__init__(capacity, max_staleness, when_full)
        self.home: Future[asyncio.AbstractEventLoop] = Future()
        self.waiting: dict[str, asyncio.Task[Any] | None] = {}
        self.withdrawn: set[str] = set()  # tickets that were taken back before their call came
        self.answered: deque[tuple[str, int, Sequence[int]]] = deque(maxlen=ANSWERS_KEPT)

    async def start(self) -> None:
        """Name the loop that owns the state: that of the first call in the default group, whichever Ray makes it."""
        if not self.home.done():
            self.home.set_result(asyncio.get_running_loop())

    async def control(self, method: str, *arguments: Any) -> Any:
        """Run a call that never waits at home."""
        home = await asyncio.wrap_future(self.home)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(getattr(self, method)(*arguments), home))

    async def wait(self, ticket: str, method: str, *arguments: Any) -> Any:
        """Run `put` or `lease` under a ticket."""
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

    async def withdraw(self, ticket: str) -> None:
        """The caller is gone: stop waiting, or return what it will not hear of to the queue."""
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


@dataclass(frozen=True, slots=True)
class RemoteQueue:
    """A MessageQueue in another process; implements `Queue` over the handle of a `QueueActor` actor."""

    actor: Any

    async def put(self, deliveries: Sequence[Delivery[Any]], timeout_s: float) -> list[int]:
        """See `MessageQueue.put`; a put that is cancelled while it is answered may have been stored."""
        dropped: list[int] = await self.wait("put", timeout_s, list(deliveries))
        return dropped

    async def lease(self, count: int, version: int, timeout_s: float) -> Lease[Any]:
        """See `MessageQueue.lease`; groups that were leased to a cancelled call go back to the head."""
        lease: Lease[Any] = await self.wait("lease", timeout_s, count, version)
        return lease

    async def acknowledge(self, lease_id: int) -> None:
        """See `MessageQueue.acknowledge`."""
        await self.control("acknowledge", lease_id)

    async def release(self, lease_id: int) -> None:
        """See `MessageQueue.release`."""
        await self.control("release", lease_id)

    async def close(self) -> None:
        """See `MessageQueue.close`."""
        await self.control("close")

    async def stats(self) -> Mapping[str, float]:
        """See `MessageQueue.stats`."""
        stats: Mapping[str, float] = await self.control("stats")
        return stats

    async def wait(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        """Make a call that waits in the actor for up to `timeout_s`; cancelled, it is withdrawn."""
        ticket = uuid4().hex
        try:
            pending = self.actor.wait.remote(ticket, method, *arguments, timeout_s)
            return await call(NAME, pending, timeout_s + CONTROL_TIMEOUT_S)
        except asyncio.CancelledError:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self.control("withdraw", ticket)
            raise

    async def control(self, method: str, *arguments: Any) -> Any:
        """Make a call that never waits, past all that do."""
        return await call(NAME, self.actor.control.options(concurrency_group=CONTROL).remote(method, *arguments))


def start_queue(
    capacity: int, max_staleness: int, when_full: WhenFull, place: Place = ANYWHERE, max_waiting: int = 1000
) -> RemoteQueue:
    """Start the queue's actor in the Ray cluster that this process is connected to.

    Args:
        capacity: see `MessageQueue`, as `max_staleness` and `when_full`.
        max_staleness: in policy versions.
        when_full: `block` or `drop_oldest`.
        place: where to.
        max_waiting: puts and leases that wait at once; more of them queue up in Ray, control calls pass.
    """
    options = {"max_concurrency": max_waiting, "concurrency_groups": {CONTROL: 16}, **place.options()}
    shell = ray.remote(**options)(QueueActor)
    actor = shell.remote(capacity, max_staleness, when_full)
    actor.start.remote()
    return RemoteQueue(actor)
