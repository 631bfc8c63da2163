"""Prompts that crash engines, and engines that keep dying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_rig import DEADLINE_S, CrashingMember, FleetRig, until
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_rig import held_out

from tidemill.errors import EngineError, EngineLostError
from tidemill.protocols import Evaluation
from tidemill.records import EngineId, Prompt
from tidemill.rollout.failures import LOSSES, LOSSES_WITHIN_S, CrashLoop, CrashQuarantine
from tidemill.rollout.group_request import GroupRequest
from tidemill.rollout.ledger import Ledger

pytestmark = pytest.mark.own_time


def test_a_crash_loop_is_one_slot_that_finishes_nothing() -> None:
    now = 0.0
    loop = CrashLoop(lambda: now)
    assert [loop.lost(EngineId(0), finished) for finished in (7, 0, 0, 1, 0, 0, 0)] == [0, 1, 2, 0, 1, 2, LOSSES]
    assert loop.lost(EngineId(1), 0) == 1
    now = LOSSES_WITHIN_S + 1
    assert loop.lost(EngineId(0), 0) == 1


def crashing_rig(
    tmp_path: Path, engines: int, deadly: Collection[int | str], prompts: int = 8, **options: Any
) -> FleetRig:
    made = type("DyingOf", (CrashingMember,), {"deadly": deadly})
    rig = FleetRig(tmp_path, engines=engines, start=made, options=options, held_out=held_out(prompts))
    for member in rig.members:
        member.__class__ = made
    return rig


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("max_attempts", [1, 3, 9])
@pytest.mark.parametrize("deadly", [{0}, {5, 6}, {9}])
async def test_a_prompt_that_crashes_engines_is_quarantined_and_no_other(
    tmp_path: Path, engines: int, max_attempts: int, deadly: set[int]
) -> None:
    rig = crashing_rig(tmp_path, engines, deadly, rollout={"max_attempts": max_attempts})
    await rig.run(5)
    assert rig.rollout.ledger.quarantined == dict.fromkeys(deadly, "kills_engine")
    assert rig.rollout.uids == [uid for uid in range(20 + len(deadly)) if uid not in deadly]
    again = Ledger.restore(rig.rollout.ledger.state(), rig.rollout.ledger.total)
    assert again.quarantined == rig.rollout.ledger.quarantined


async def test_if_every_prompt_crashes_its_engine_the_run_ends(tmp_path: Path) -> None:
    rig = crashing_rig(tmp_path, 1, range(200))
    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        with pytest.raises(EngineError, match=r"3 prompts in a row, occurrences \[0, 1, 2\], crashed 3 engines each"):
            await rig.rollout.rollouter.run()


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(("max_attempts", "deaths"), [(1, 2), (3, 3), (9, 3)])
@pytest.mark.parametrize("deadly", [{"evaluation-0"}, {"evaluation-2", "evaluation-7"}, {"evaluation-5", 6}])
async def test_a_held_out_prompt_that_crashes_engines_is_skipped_and_no_other(
    tmp_path: Path, engines: int, max_attempts: int, deaths: int, deadly: set[int | str]
) -> None:
    rig = crashing_rig(tmp_path, engines, deadly, rollout={"max_attempts": max_attempts})
    scores: list[Evaluation] = []

    async def score(version: int) -> None:
        scores.append(await rig.rollout.rollouter.evaluate(version))

    await rig.run(5, lambda version: score(version) if version in (1, 3) else None)
    rows = [row for row in range(8) if f"evaluation-{row}" not in deadly]
    assert [[int(answer.expected or "") for answer in score.answers] for score in scores] == [rows, rows]
    assert [score.skipped for score in scores] == [{"kills_engine": 8 - len(rows)}] * 2
    assert rig.rollout.ledger.quarantined == {uid: "kills_engine" for uid in deadly if isinstance(uid, int)}
    assert len(rig.started) <= len(deadly) * deaths + 1  # a crash beside a held-out prompt does not count for a group


@pytest.mark.parametrize("width", [1, 2, 16])
async def test_deadly_held_out_prompts_are_no_crash_loop(tmp_path: Path, width: int) -> None:
    deadly = {f"evaluation-{row}" for row in (0, 1, 6)}
    rig = crashing_rig(tmp_path, 1, deadly, rollout={"concurrent_samples_per_replica": width})
    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        assert (await rig.rollout.rollouter.evaluate(0)).skipped == {"kills_engine": 3}
    assert len(rig.started) <= 3 * 3


async def test_if_every_held_out_prompt_crashes_its_engine_the_run_ends(tmp_path: Path) -> None:
    rig = crashing_rig(tmp_path, 1, [f"evaluation-{row}" for row in range(8)])
    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        with pytest.raises(EngineError, match=r"3 held-out prompts, rows \[0, 1, 2\], crashed 3 engines each"):
            await rig.rollout.rollouter.evaluate(0)


async def test_many_held_out_prompts_that_crash_their_engine_end_the_run(tmp_path: Path) -> None:
    rig = crashing_rig(
        tmp_path, 1, [f"evaluation-{row}" for row in range(4, 24)], rollout={"max_attempts": 1}, prompts=24
    )
    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        with pytest.raises(EngineError, match=r"8 held-out prompts, rows \[4, .*crashed 2 engines each"):
            await rig.rollout.rollouter.evaluate(0)


async def test_a_prompt_that_crashes_spare_engines_costs_few_scores_and_not_all(tmp_path: Path) -> None:
    rig = crashing_rig(tmp_path, 2, {"evaluation-3"})
    outcomes: list[Mapping[str, int] | None] = []

    async def score(version: int) -> None:
        engine = await rig.fleet.reserve_spare()
        assert engine is not None
        try:
            outcomes.append((await rig.rollout.rollouter.evaluate(version, engine)).skipped)
        except EngineLostError:
            outcomes.append(None)
            await until(lambda: engine not in {member.id for member in rig.fleet.members})
        await rig.fleet.release_spare(engine)
        await until(lambda: len(rig.fleet.members) == 2)

    await rig.run(5, score)
    assert outcomes == [None, None, None, {"kills_engine": 1}, {"kills_engine": 1}]
    assert rig.rollout.ledger.quarantined == {}


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    deadly=st.sets(st.integers(0, 30), max_size=2),
    concurrent=st.integers(1, 12),
    max_attempts=st.integers(1, 9),
)
def test_only_the_deadly_prompt_is_quarantined_whatever_runs_beside_it(
    seed: int, deadly: set[int], concurrent: int, max_attempts: int
) -> None:
    """One engine. The groups that finish before a crash are drawn; one crash has another cause than a prompt."""
    ledger, rng, in_flight = Ledger(40), random.Random(seed), dict[int, GroupRequest]()
    crashes, accident = CrashQuarantine(ledger, max_attempts), rng.randrange(40) if max_attempts > 2 else None
    while (uid := ledger.next_uid()) is not None or in_flight:
        while uid is not None and len(in_flight) < concurrent and not crashes.must_wait(uid, in_flight.values()):
            ledger.dispatched(uid)
            in_flight[uid] = GroupRequest(Prompt(uid, 0, np.zeros(1, np.int32), ""), uid, 0, 0.0)
            uid = ledger.next_uid()
        for done in [uid for uid in in_flight if uid not in deadly and rng.random() < 0.4]:
            crashes.generated()
            ledger.queued(done)
            ledger.trained([done])
            del in_flight[done]
        died = accident in in_flight and not any(ledger.crashes(uid) for uid in in_flight)
        accident = None if died else accident
        if died or deadly & set(in_flight):
            assert {uid for uid in in_flight if crashes.crashed(uid, EngineId(0))} <= deadly
            in_flight.clear()
    assert set(ledger.quarantined) == deadly
    assert ledger.trained_count == 40 - len(deadly)
    ledger.check()
