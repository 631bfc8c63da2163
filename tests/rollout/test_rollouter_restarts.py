"""Restarts of a run whose generation is far ahead of its training: queued groups are issued again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rollout_rig import Rig, run_config

pytestmark = pytest.mark.own_time

AHEAD = 16
"""Groups that the bound allows at once: four batches of four."""


def settings(steps: int) -> Any:
    return run_config(data={"epochs": 1}, trainer={"steps": steps}, asynchrony={"max_staleness": 3})


async def far_ahead(rig: Rig) -> asyncio.Task[None]:
    """Let generation fill the queue before the first training step."""
    run = asyncio.create_task(rig.rollouter.run())
    async with asyncio.timeout(20):
        while (await rig.queue.stats())["depth"] < AHEAD:
            await asyncio.sleep(0.001)
    return run


async def resumed(before: Rig, run: asyncio.Task[None]) -> Rig:
    """Kill the run and start it again from the ledger of its newest version."""
    state = json.loads(json.dumps(await before.rollouter.ledger_state()))
    run.cancel()
    after = Rig(before.config, rows=before.rows, state=state, version=before.version)
    after.engines[0]._version = before.version
    return after


@pytest.mark.parametrize("trained", [0, 1, 2])
async def test_groups_that_were_finished_and_not_trained_are_trained_after_a_restart(trained: int) -> None:
    before = Rig(settings(steps=6), rows=24)
    run = await far_ahead(before)
    if trained:
        await before.train(steps=trained)
    after = await resumed(before, run)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(after.rollouter.run())
        tasks.create_task(after.train(steps=6 - trained))
    assert sorted(before.uids + after.uids) == list(range(24))
    assert after.ledger.counts()["dropped/restart"] >= AHEAD - 4 * trained


async def test_data_that_was_used_up_before_a_restart_does_not_begin_anew() -> None:
    before = Rig(settings(steps=9), rows=AHEAD)
    run = await far_ahead(before)
    await before.train(steps=1)
    after = await resumed(before, run)
    assert await after.run() == 3
    assert sorted(before.uids + after.uids) == list(range(AHEAD))
    counts = after.ledger.counts()
    assert (counts["trained"], counts["waiting"], counts["dispatched"], counts["queued"]) == (AHEAD, 0, 0, 0)
