"""What becomes of a call to an actor that fails, dies or never answers."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tidemill.actors.call import call
from tidemill.errors import ConfigError, RunError


async def failing(error: Exception) -> Any:
    raise error


async def test_error_of_the_actor_is_raised_as_it_is_and_keeps_the_remote_traceback() -> None:
    remote = RayTaskError("update", "remote line 7", ConfigError("key", 1, "2", "Mend it."))
    with pytest.raises(ConfigError) as caught:
        await call("trainer rank 0", failing(remote))
    assert type(caught.value) is ConfigError
    assert "remote line 7" in "".join(traceback.format_exception(caught.value))


async def test_time_out_inside_the_actor_stays_one() -> None:
    with pytest.raises(TimeoutError, match="no room"):
        await call("the queue", failing(RayTaskError("put", "trace", TimeoutError("no room"))))


async def test_death_names_the_actor() -> None:
    with pytest.raises(RunError, match="engine 1 died"):
        await call("engine 1", failing(ActorDiedError()))


async def test_actor_that_never_answers_ends_at_the_deadline() -> None:
    with pytest.raises(RunError, match=r"trainer rank 0 did not answer within 0\.05 s"):
        await call("trainer rank 0", asyncio.sleep(60), timeout_s=0.05)
