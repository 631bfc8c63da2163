"""Engines that die, are replaced and catch up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from fleet_rig import DEADLINE_S, FakeMember, FleetRig, until

from tidemill.errors import EngineError, EngineLostError, RunError, StoreError
from tidemill.fakes import Fault
from tidemill.protocols import PauseMode, WeightUpdate
from tidemill.records import EngineId
from tidemill.rollout.elasticity import VERSIONS, Elasticity
from tidemill.rollout.failures import LOSSES

pytestmark = pytest.mark.own_time


async def test_an_engine_that_dies_is_replaced_by_one_with_the_newest_version_and_no_group_is_lost(
    tmp_path: Path,
) -> None:
    rig = FleetRig(tmp_path, options={"trainer": {"steps": 8}})

    async def die(step: int) -> None:
        if step == 2:
            await until(lambda: bool(rig.members[0]._running))
            await rig.members[0].shutdown()
        if step == 6:
            await until(lambda: len(rig.fleet.members) == len(rig.started) + 1 == 2 and bool(rig.started[0].requests))

    await rig.run(8, die)
    [replacement] = rig.started
    assert replacement.id == EngineId(2)
    assert [member.id.number for member in rig.fleet.members] == [1, 2]
    assert replacement.adopted[0] >= 2 and replacement.adopted[-1] == 8
    assert len(rig.rollout.uids) == len(set(rig.rollout.uids)) == 8 * 4
    assert rig.rollout.ledger.counts()["dropped/engine_lost"] > 0
    assert rig.rollout.ledger.counts()["quarantined"] == 0
    assert rig.members[0].ended
    assert any("engine 0 is lost and will be replaced" in notice for notice in rig.notices)


async def test_when_the_last_engine_dies_the_trainer_waits_for_the_next_one(tmp_path: Path) -> None:
    rig = FleetRig(tmp_path, engines=1)

    async def die(step: int) -> None:
        if step == 2:
            await rig.members[0].shutdown()

    await rig.run(5, die)
    assert [member.id.number for member in rig.fleet.members] == [1]
    assert len(rig.rollout.uids) == len(set(rig.rollout.uids)) == 5 * 4


async def test_generation_goes_on_with_the_rest_while_the_next_engine_has_no_place(tmp_path: Path) -> None:
    place = asyncio.Event()
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, pending=place))

    async def die(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
        if step == 4:
            assert [member.id.number for member in rig.fleet.members] == [1]
            place.set()
            await until(lambda: len(rig.fleet.members) == 2)

    await rig.run(5, die)
    assert rig.started[0].adopted[0] == 4


async def test_an_engine_that_never_finds_a_place_ends_the_run_only_if_it_is_the_last(tmp_path: Path) -> None:
    never = asyncio.Event()
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, pending=never), start_timeout_s=0.05)

    async def die(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
            await until(lambda: len(rig.started) >= 3)
            assert all(member.ended for member in rig.started[:-1])
        if step == 3:
            await rig.members[1].shutdown()

    with pytest.raises(RunError, match=r"was not placed and loaded within 0\.05 s .*no other engine is left"):
        await rig.run(5, die)


async def test_engines_that_die_for_ever_end_the_run_with_their_error(tmp_path: Path) -> None:
    broken = EngineError("vLLM could not start: no such kernel")
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, fails=broken))

    async def die(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
            await asyncio.sleep(DEADLINE_S)

    with pytest.raises(EngineError, match=r"3 engines in a row.*no such kernel") as caught:
        await rig.run(5, die)
    assert caught.value.__cause__ is broken
    assert len(rig.started) == LOSSES
    assert all(member.ended for member in rig.started)


async def test_a_store_that_is_away_for_a_moment_costs_another_attempt(tmp_path: Path) -> None:
    away = iter([StoreError("no answer")])
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, fails=next(away, None)))

    async def die(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
            await until(lambda: [member.id.number for member in rig.fleet.members] == [1, 3])

    await rig.run(3, die)
    assert [member.id.number for member in rig.started] == [2, 3]


async def test_an_engine_that_is_stuck_is_found_by_the_probe_and_ended_and_asked_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = FleetRig(tmp_path)

    async def hang(step: int) -> None:
        if step == 1:
            rig.members[0].hangs.set()
            await until(lambda: [m.id.number for m in rig.fleet.members] == [1, 2])

    await rig.run(3, hang)
    assert rig.members[0].ended
    assert "is left out" not in caplog.text  # of a publication


async def test_an_engine_that_is_lost_in_a_publication_is_replaced(tmp_path: Path) -> None:
    rig = FleetRig(tmp_path)

    async def stuck(update: WeightUpdate, mode: PauseMode) -> None:
        await asyncio.sleep(60)

    async def hang(step: int) -> None:
        if step == 1:
            rig.members[0].update_weights = stuck  # type: ignore[method-assign]
        if step == 2:
            await until(lambda: [m.id.number for m in rig.fleet.members] == [1, 2])

    await rig.run(3, hang)
    assert rig.members[0].ended
    assert rig.started[0].adopted[-1] == 3


async def test_an_engine_that_only_the_rollouter_cannot_reach_is_replaced(tmp_path: Path) -> None:
    rig = FleetRig(tmp_path)

    async def away(step: int) -> None:
        if step == 1:
            rig.rollout.rollouter._engines._engines[EngineId(0)].lost = "its connection is lost"
            await until(lambda: bool(rig.started) and len(rig.fleet.members) == 2)

    await rig.run(3, away)
    assert any("its connection is lost" in notice for notice in rig.notices)


async def test_nothing_is_left_of_an_engine_that_starts_when_the_run_ends(tmp_path: Path) -> None:
    never = asyncio.Event()
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, pending=never))

    async def die(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
            await until(lambda: bool(rig.started))

    await rig.run(3, die)
    assert rig.started[0].ended


@pytest.mark.parametrize("end", ["the run ends", "the rollouter dies"])
async def test_an_engine_that_is_being_removed_is_ended_whatever_happens(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, asked = FleetRig(tmp_path), asyncio.Event()

    async def remove(engine_id: EngineId, reason: str, drain_s: float = 0.0) -> int:
        asked.set()
        if end == "the rollouter dies":
            raise RunError("the rollouter died")
        await asyncio.sleep(DEADLINE_S)
        return 0

    monkeypatch.setattr(rig.rollout.rollouter, "remove_engine", remove)
    with suppress(RunError):
        async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
            rig.members[0].hangs.set()
            await asked.wait()
    assert rig.members[0].ended


WAITING = {"time/step": 1.0, "time/sync": 0.1, "idle/trainer": 0.5, "idle/rollouter": 0.0}
AHEAD = {"time/step": 1.0, "time/sync": 0.1, "idle/trainer": 0.0, "idle/rollouter": 0.9}


async def test_an_engine_is_added_while_the_trainer_waits_and_retired_while_generation_does(tmp_path: Path) -> None:
    rig = FleetRig(tmp_path, engines=1, options={"trainer": {"steps": 8}}, elasticity=Elasticity(1, 2))

    async def load(step: int) -> None:
        if step == 2:
            for _ in range(VERSIONS):
                rig.fleet.measured(WAITING)
            await until(lambda: rig.rollout.rollouter._admission.policy.max_concurrent > 16)
            assert rig.started[0].adopted == [2]
            assert rig.rollout.rollouter._admission.policy.max_concurrent == 2 * 16
            for _ in range(2 * VERSIONS):  # no more than the bound
                rig.fleet.measured(WAITING)
            assert len(rig.started) == 1
        if step == 5:
            for _ in range(VERSIONS):
                rig.fleet.measured(AHEAD)
            await until(lambda: rig.started[0].ended)
            assert [member.id.number for member in rig.fleet.members] == [0]
            assert rig.rollout.rollouter._admission.policy.max_concurrent == 16

    await rig.run(8, load)
    assert rig.started[0].adopted[-1] == 5
    assert rig.started[0].requests
    assert rig.members[0].adopted[-1] == 8
    assert len(rig.rollout.uids) == len(set(rig.rollout.uids)) == 8 * 4


async def test_a_spare_engine_catches_up_by_the_pause_mode_of_the_run_and_growth_continues(tmp_path: Path) -> None:
    """What it has in flight is to be treated as on any other engine."""
    rig = FleetRig(tmp_path, elasticity=Elasticity(1, 3))
    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        for version in range(2):
            await rig.fleet.publish(version, "wait")
        engine_id = await rig.fleet.reserve_spare()
        assert engine_id is not None
        await rig.fleet.publish(2, "wait")
        [spare] = [member for member in rig.members if member.id == engine_id]
        assert spare.adopted == [0, 1]
        for _ in range(VERSIONS):
            rig.fleet.measured(WAITING)
        await rig.fleet.release_spare(engine_id)
        await rig.fleet.publish(3, "wait")
        assert (spare.adopted, spare.modes) == ([0, 1, 2, 3], ["wait"] * 4)
        assert not rig.started
        for _ in range(VERSIONS):
            rig.fleet.measured(WAITING)
        await until(lambda: bool(rig.started))


@pytest.mark.parametrize("error", [EngineError("no"), EngineLostError("it died"), StoreError("no answer")])
async def test_a_spare_engine_that_cannot_catch_up_is_replaced(tmp_path: Path, error: Exception) -> None:
    rig = FleetRig(tmp_path)

    async def fail(update: WeightUpdate, mode: PauseMode) -> None:
        raise error

    async with asyncio.timeout(DEADLINE_S), rig.fleet.kept():
        await rig.fleet.publish(0, "keep")
        assert await rig.fleet.reserve_spare() == EngineId(1)
        rig.members[1].update_weights = fail  # type: ignore[method-assign]
        await rig.fleet.publish(1, "keep")
        await rig.fleet.release_spare(EngineId(1))
        await until(lambda: [member.id.number for member in rig.fleet.members] == [0, 2])
    assert (rig.members[1].ended, rig.started[0].adopted) == (True, [1])


async def test_an_engine_that_is_retired_finishes_what_it_has_and_what_takes_too_long_is_issued_again(
    tmp_path: Path,
) -> None:
    rig = FleetRig(tmp_path, engines=2, options={"trainer": {"steps": 6}}, elasticity=Elasticity(1, 2))
    rig.members[1]._faults = {uid: Fault("hang") for uid in range(200)}

    async def load(step: int) -> None:
        if step == 1:
            await until(lambda: bool(rig.members[1]._running))
            for _ in range(VERSIONS):
                rig.fleet.measured(AHEAD)

    await rig.run(6, load)
    assert rig.members[1].ended
    assert len(rig.rollout.uids) == len(set(rig.rollout.uids)) == 6 * 4


async def test_nothing_is_added_or_retired_while_an_engine_is_being_replaced(tmp_path: Path) -> None:
    place = asyncio.Event()
    rig = FleetRig(tmp_path, start=lambda engine_id: FakeMember(engine_id, pending=place), elasticity=Elasticity(1, 4))

    async def load(step: int) -> None:
        if step == 1:
            await rig.members[0].shutdown()
            await until(lambda: bool(rig.started))
            for metrics in (WAITING, AHEAD):
                for _ in range(VERSIONS):
                    rig.fleet.measured(metrics)
            await asyncio.sleep(0.01)
            assert (len(rig.started), len(rig.fleet.members)) == (1, 1)

    await rig.run(3, load)


async def test_growth_that_finds_no_room_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    never = asyncio.Event()
    rig = FleetRig(
        tmp_path,
        start=lambda engine_id: FakeMember(engine_id, pending=never),
        start_timeout_s=0.02,
        elasticity=Elasticity(2, 4),
    )

    async def load(step: int) -> None:
        if step == 1:
            for _ in range(VERSIONS):
                rig.fleet.measured(WAITING)
            await until(lambda: any("was not placed and loaded" in notice for notice in rig.notices))
            assert rig.started[0].ended

    await rig.run(3, load)
    assert len(rig.started) == 1
