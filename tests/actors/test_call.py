"""What becomes of a call to an actor that fails, dies or never answers."""

from __future__ import annotations

import asyncio
import re
import traceback
from typing import Any

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

from tidemill.actors.call import call
from tidemill.errors import ConfigError, RunError


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
