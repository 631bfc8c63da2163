"""One call of an actor."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from tidemill.errors import RunError

T = TypeVar("T")
# Open calls of an asynchronous actor: far more than groups are ever in flight, so that no control call waits for a
# generation. A concurrency group of Ray would run on an event loop of its own, out of reach of the actor's tasks.
MAX_CALLS = 100_000
IO = "io"  # uploads run beside the training step


async def call(name: str, reference: Awaitable[T]) -> T:
    """Await an actor call; a remote failure is raised as itself, an actor's death as RunError.

    Raises:
        RunError: the actor died; the message says which one.
    """
    try:
        return await reference
    except RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except RayActorError as error:
        raise RunError(f"{name} died: {error}") from error
