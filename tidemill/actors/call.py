"""One call of an actor."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from tidemill.errors import RunError, TidemillError

T = TypeVar("T")
# Open calls of an asynchronous actor: far more than groups are ever in flight, so that no control call waits for a
# generation. A concurrency group of Ray would run on an event loop of its own, out of reach of the actor's tasks.
MAX_CALLS = 100_000
IO = "io"  # uploads run beside the training step
WEIGHTS = "weights"  # so does the upload of a version, and that of its snapshot for an engine that joins
WHY = re.compile(r"The actor (?:is dead|died) because (?:.*Worker exit detail: )?(.+?)(?:\.\s|\.?$)")
CONTROL_TIMEOUT_S = 120.0  # of a call that an actor answers at once; a process that is stopped never does


async def call(
    name: str,
    reference: Awaitable[T],
    timeout_s: float | None = CONTROL_TIMEOUT_S,
    *,
    lost: type[TidemillError] = RunError,
) -> T:
    """Await an actor call; what was raised there is raised as it is, with the remote traceback as its cause.

    Args:
        name: of the actor, for messages.
        reference: what `.remote(...)` returned.
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
    except OutOfMemoryError as error:  # Ray ended it, for lack of memory on its machine; no RayActorError
        raise lost(f"{name} died: {str(error).strip().splitlines()[0]}") from error
    except ObjectLostError as error:  # a large answer stays where it was made until it is fetched; no RayActorError
        raise lost(f"{name} died: what it had ready is lost with its process or machine") from error
    except TimeoutError as error:
        raise lost(f"{name} did not answer within {timeout_s:g} s: its process is stuck or stopped") from error


def reason(error: RayActorError) -> str:
    """Why an actor died, on one line, or nothing where Ray does not know; its own text is long, and lists guesses."""
    lines = str(error).strip().splitlines()
    if error.actor_init_failed:
        return lines[-1].strip()  # of the traceback: the error itself
    for line in lines:
        if match := WHY.search(line):
            return match[1]
    return "" if len(lines) > 1 or lines[0] == ActorDiedError.BASE_ERROR_MSG else lines[0]
