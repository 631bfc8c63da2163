"""Calls of actors, and the typed proxies made of them.

A proxy is a class with one line for each method:

    @dataclass(frozen=True)
    class RemoteCounter(Remote):
        actor: Any
        name = "the counter"

        add = forward(Counter.add)
        wait = forward(Counter.wait, timeout_s=None)

The actor behind it is a class that has these methods itself, or passes them on to an object that it makes when it
starts (`delegate`). An error that is raised in the actor is raised here as it is, with the remote traceback as its
cause; the death of the actor is an error of Tidemill.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from tidemill.errors import RunError, TidemillError

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound=type)
# Open calls of an asynchronous actor: far more than groups in flight, so that no control call waits for a generation.
# A concurrency group of Ray has an event loop of its own, which cannot reach the tasks of the actor.
MAX_CALLS = 100_000
IO = "io"  # concurrency group of Ray: uploads run concurrently with the training step
WEIGHTS = "weights"  # likewise the upload of a version, or of a snapshot for an engine that joins
WHY = re.compile(r"The actor (?:is dead|died) because (?:.*Worker exit detail: )?(.+?)(?:\.\s|\.?$)")
CONTROL_TIMEOUT_S = 120.0  # of a call that an actor answers at once, unless its process is stopped


class Remote(ABC):
    """An object in another process.

    Attributes:
        actor: its handle.
        lost: the error for an actor that is lost.
    """

    actor: Any
    lost: ClassVar[type[TidemillError]] = RunError

    @property
    @abstractmethod
    def name(self) -> str:
        """The actor in messages."""

    async def answer(self, reference: Awaitable[T], timeout_s: float | None = CONTROL_TIMEOUT_S) -> T:
        return await call(self.name, reference, timeout_s, lost=self.lost)


def forward(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], timeout_s: float | None = CONTROL_TIMEOUT_S
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of a `Remote` that calls the method of the same name and type in the actor.

    Args:
        method: of the actor's class or of the protocol that it implements.
        timeout_s: None where the caller has a deadline of its own.
    """

    @wraps(method)
    async def forwarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = await self.answer(getattr(self.actor, method.__name__).remote(*args, **kwargs), timeout_s)
        return answer

    return forwarded


def delegate(*protocols: type) -> Callable[[C], C]:
    """Give an actor's class the methods of protocols that it does not define: they call those of `self.target()`."""

    def complete(actor: C) -> C:
        for protocol in protocols:
            for name, method in inspect.getmembers(protocol, inspect.iscoroutinefunction):
                if name not in vars(actor):
                    setattr(actor, name, delegated(method))
        return actor

    return complete


def delegated(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """The method of an actor that calls the method of the same name of its target."""

    @wraps(method)
    async def passed_on(self: Any, *args: Any, **kwargs: Any) -> T:
        result: T = await getattr(self.target(), method.__name__)(*args, **kwargs)
        return result

    return passed_on


async def call(
    name: str,
    reference: Awaitable[T],
    timeout_s: float | None = CONTROL_TIMEOUT_S,
    *,
    lost: type[TidemillError] = RunError,
) -> T:
    """Await an actor call; an error of the actor is raised itself, with the remote traceback as its cause.

    Args:
        name: of the actor, for messages.
        reference: the result of `.remote(...)`.
        timeout_s: None where the caller has a deadline of its own, or the call lasts as long as the run.
        lost: the error for an actor that is lost.

    Raises:
        RunError: or `lost`: the actor died or did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise lost(": ".join(filter(None, [f"{name} died", reason(error)]))) from error
    except OutOfMemoryError as error:  # Ray killed it because its machine ran out of memory; this is no RayActorError
        raise lost(f"{name} died: {str(error).strip().splitlines()[0]}") from error
    except (
        ObjectLostError
    ) as error:  # a large answer stays on its machine until it is fetched; this is no RayActorError
        raise lost(f"{name} died: its answer is lost with its process or machine") from error
    except TimeoutError as error:
        raise lost(f"{name} did not answer within {timeout_s:g} s: its process is stuck or stopped") from error


def reason(error: RayActorError) -> str:
    """Why an actor died, on one line, or "" if Ray does not know; Ray's text is long and lists guesses."""
    lines = str(error).strip().splitlines()
    if error.actor_init_failed:
        return lines[-1].strip()  # the error itself, below its traceback
    for line in lines:
        if match := WHY.search(line):
            return match[1]
    return "" if len(lines) > 1 or lines[0] == ActorDiedError.BASE_ERROR_MSG else lines[0]
