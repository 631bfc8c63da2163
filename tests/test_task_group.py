"""Tasks that end together, and what of their failures is told."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.errors import EngineError, RunError, SyncError
from tidemill.task_group import task_group

pytestmark = pytest.mark.own_time
REMOTE = RuntimeError("the traceback of a worker")


async def refuse() -> None:
    raise SyncError("wrong file") from REMOTE


async def fail_in_the_end() -> None:
    """As what is cancelled may, while it cleans up."""
    try:
        await asyncio.sleep(60)
    finally:
        raise EngineError("it did not end")


async def test_the_first_failure_is_raised_as_it_is_with_its_cause() -> None:
    with pytest.raises(SyncError, match="wrong file") as failure:
        async with task_group() as tasks:
            tasks.create_task(refuse())
            tasks.create_task(fail_in_the_end())
            await asyncio.sleep(60)
    assert failure.value.__cause__ is REMOTE


async def test_a_failure_of_the_body_ends_the_tasks_and_is_raised() -> None:
    with pytest.raises(RunError, match="no batch"):
        async with task_group() as tasks:
            waiting = tasks.create_task(asyncio.sleep(60))
            raise RunError("no batch")
    assert waiting.cancelled()


async def test_who_is_cancelled_from_outside_is_told_of_that_alone() -> None:
    async def work() -> None:
        async with task_group() as tasks:
            tasks.create_task(asyncio.sleep(60))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
