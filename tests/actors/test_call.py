"""Calls of actors that fail, die or never answer, and the proxies that make them."""

from __future__ import annotations

import asyncio
import re
import traceback
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayTaskError,
)

from tidemill.actors.call import Remote, call, delegate, forward
from tidemill.errors import ConfigError, EngineLostError, RunError


def died(why: str) -> ActorDiedError:
    """The death of an actor as Ray tells it."""
    return ActorDiedError(
        ActorDiedErrorContext(error_message=why, class_name="EngineActor", actor_id=b"\1" * 16, pid=7)
    )


async def failing(error: Exception) -> Any:
    raise error


async def test_error_of_the_actor_is_raised_as_it_is_and_keeps_the_remote_traceback() -> None:
    remote = RayTaskError("update", "remote line 7", ConfigError("key", 1, "2", "Correct it."))
    with pytest.raises(ConfigError) as caught:
        await call("trainer rank 0", failing(remote))
    assert type(caught.value) is ConfigError
    assert "remote line 7" in "".join(traceback.format_exception(caught.value))


async def test_time_out_inside_the_actor_stays_one() -> None:
    with pytest.raises(TimeoutError, match="no room"):
        await call("the queue", failing(RayTaskError("put", "trace", TimeoutError("no room"))))


CRASH = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called."
)
DEATHS: list[tuple[Exception, str]] = [
    (ActorDiedError(), "engine 1 died"),
    (died(CRASH), "engine 1 died: Worker unexpectedly exits with a connection error code 2"),
    (died("The actor is dead because it was killed by `ray.kill`."), "engine 1 died: it was killed by `ray.kill`"),
    (died("The actor died because its node has died. Node Id: ab"), "engine 1 died: its node has died"),
    (died("Something new.\nOf two lines."), "engine 1 died"),
    (ActorDiedError(RayTaskError("__init__", "Trace\nKeyError: 7", KeyError(7))), "engine 1 died: KeyError: 7"),
    (
        OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory: 22 GB"),
        "engine 1 died: Task was killed due to the node running low on memory\\.",
    ),
    (ActorUnavailableError("lost its connection", b"\1" * 16), "engine 1 died: The actor .* is unavailable: lost .*"),
    (ObjectLostError("ab", None, ""), "engine 1 died: its answer is lost with its process or machine"),
    (OwnerDiedError("ab", None, ""), "engine 1 died: its answer is lost with its process or machine"),
]


@pytest.mark.parametrize(("death", "message"), DEATHS)
async def test_death_names_the_actor_and_the_reason_on_one_line(death: Exception, message: str) -> None:
    with pytest.raises(RunError) as caught:
        await call("engine 1", failing(death))
    assert re.fullmatch(message, str(caught.value))
    assert caught.value.__cause__ is death


async def test_actor_that_never_answers_ends_at_the_deadline() -> None:
    with pytest.raises(RunError, match=r"trainer rank 0 did not answer within 0\.05 s"):
        await call("trainer rank 0", asyncio.sleep(60), timeout_s=0.05)


class Counter(Protocol):
    async def add(self, number: int, times: int = 1) -> int: ...

    async def wait(self) -> None: ...


class Plain:
    total = 0

    async def add(self, number: int, times: int = 1) -> int:
        self.total += number * times
        return self.total

    async def wait(self) -> None:
        await asyncio.sleep(60)


@delegate(Counter)
class CounterActor:
    """Passes `add` on and has a `wait` of its own."""

    def __init__(self) -> None:
        self.plain = Plain()

    def target(self) -> Plain:
        return self.plain

    async def wait(self) -> None:
        await asyncio.sleep(30)


class Handle:
    """What Ray gives for an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


@dataclass(frozen=True)
class RemoteCounter(Remote):
    actor: Any
    name = "the counter"
    lost = EngineLostError

    add = forward(Counter.add)
    wait = forward(Counter.wait, timeout_s=0.05)


async def test_a_proxy_calls_the_method_of_the_same_name_of_the_actors_target() -> None:
    counter = RemoteCounter(Handle(CounterActor()))
    assert [await counter.add(2), await counter.add(3, times=2)] == [2, 8]


async def test_a_proxy_has_its_own_deadline_and_its_own_error_for_a_lost_actor() -> None:
    with pytest.raises(EngineLostError, match=r"the counter did not answer within 0\.05 s"):
        await RemoteCounter(Handle(CounterActor())).wait()


def test_an_actor_keeps_the_methods_that_it_defines_itself() -> None:
    assert CounterActor.wait.__qualname__ == "CounterActor.wait"
    assert CounterActor.add.__name__ == "add"  # type: ignore[attr-defined]
