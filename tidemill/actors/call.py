"""One call of an actor."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayTaskError

from tidemill.errors import RunError

T = TypeVar("T")
CONTROL = "control"  # a concurrency group of its own, so that a thousand open generations cannot starve it
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
