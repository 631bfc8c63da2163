"""The event loop of tests that are marked `own_time`."""

from __future__ import annotations

import asyncio

import pytest
from own_time import own_time

pytestmark = pytest.mark.own_time
HOUR_S = 3600.0


async def test_timers_end_in_their_order_and_after_their_time() -> None:
    ended: list[float] = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(seconds)

    began = own_time()
    await asyncio.gather(sleep(2 * HOUR_S), sleep(HOUR_S), sleep(0.0))
    assert ended == [0.0, HOUR_S, 2 * HOUR_S]
    assert own_time() - began == pytest.approx(2 * HOUR_S, abs=1.0)


async def test_a_task_that_only_yields_reaches_its_deadline_too() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            while True:
                await asyncio.sleep(0)


async def test_the_loop_waits_for_a_thread() -> None:
    assert await asyncio.to_thread(sum, [1, 2]) == 3
