"""Tasks that end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` whose first failure is raised as it is, with the remote traceback it may have as cause."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
        raise first from first.__cause__
