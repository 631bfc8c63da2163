"""Publishing a version to engines."""

from __future__ import annotations

import asyncio
import errno
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sync_rig import FakeWeights, SyncRig, uniform, write

from tidemill.config.asynchrony import SyncConfig
from tidemill.errors import RETRYABLE, ChainError, EngineError, EngineLostError, RunError, StoreError, SyncError
from tidemill.fakes import FakeEngine
from tidemill.protocols import PauseMode, WeightUpdate
from tidemill.records import EngineId
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import Publication, SharedMemoryTransport

pytestmark = pytest.mark.own_time

CANARY = np.arange(6, dtype=np.int32)


class Refusing(FakeEngine):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error or SyncError("wrong file")

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        raise self.error


class Stuck(FakeEngine):
    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        await asyncio.sleep(60)


class Gated(FakeEngine):
    """Adopts a version when its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        self.asked.set()
        await self.gate.wait()
        await super().update_weights(update, mode)


class Shifted(FakeEngine):
    """Computes other log-probs than the trainer."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    async def score(self, token_ids: Any) -> Any:
        return await uniform(token_ids) + np.float32(self.shift)


async def settle() -> None:
    """Let every task come to where it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


def rig(tmp_path: Path, *engines: FakeEngine, score: Any = uniform, **options: Any) -> SyncRig:
    expected = options.pop("expected_nbytes", 0)
    source = FakeWeights(score=score)
    transport = SharedMemoryTransport(tmp_path / "shm", source, expected)
    return SyncRig(Synchronizer(SyncConfig(**options), transport, source, CANARY), *engines)


def exporting(tmp_path: Path, export: Any) -> SyncRig:
    source = FakeWeights(export)
    return SyncRig(
        Synchronizer(SyncConfig(), SharedMemoryTransport(tmp_path / "shm", source), source, CANARY), FakeEngine()
    )


async def test_every_engine_adopts_the_version(tmp_path: Path) -> None:
    engines = FakeEngine(), FakeEngine()
    metrics = await rig(tmp_path, *engines).publish(3, "keep")
    assert [await engine.version() for engine in engines] == [3, 3]
    assert metrics["sync/canary_gap"] == 0.0
    assert {"time/sync_export", "time/sync_adopt", "time/sync_canary"} <= metrics.keys()


async def test_the_newest_file_is_kept_and_one_to_write_again(tmp_path: Path) -> None:
    sync = rig(tmp_path, FakeEngine())
    for version in (1, 2, 5, 6):
        await sync.publish(version, "keep")
    assert {path.name for path in (tmp_path / "shm").iterdir()} == {"v6.safetensors", "spare.safetensors"}


async def test_the_same_version_can_be_published_again(tmp_path: Path) -> None:
    sync = rig(tmp_path, FakeEngine())
    await sync.publish(0, "keep")
    await sync.publish(0, "keep")
    assert (tmp_path / "shm" / "v0.safetensors").exists()


async def test_a_refusing_engine_is_named_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"1 of 2 engines did not adopt version 1: engine 1: wrong file"):
        await rig(tmp_path, FakeEngine(), Refusing()).publish(1, "keep")


async def test_an_engine_that_dies_or_is_stuck_is_left_out_and_the_others_adopt(tmp_path: Path) -> None:
    alive, dead = FakeEngine(), FakeEngine()
    await dead.shutdown()
    sync = rig(tmp_path, dead, alive, Stuck(), timeout_s=0.05)
    await sync.publish(1, "keep")
    assert await alive.version() == 1
    stuck = "could not adopt version 1 within sync.timeout_s = 0.05 s"
    assert sync.lost == {EngineId(0): "fake engine: it was shut down", EngineId(2): stuck}
    await sync.publish(2, "keep")
    assert (await alive.version(), sync.lost) == (2, {})


async def test_a_death_hides_no_refusal(tmp_path: Path) -> None:
    dead = FakeEngine()
    await dead.shutdown()
    with pytest.raises(SyncError, match="1 of 2 engines did not adopt version 1: engine 1: wrong file"):
        await rig(tmp_path, dead, Refusing()).publish(1, "keep")


async def test_an_engine_that_joins_after_all_have_died_is_compared_with_the_weights_of_its_version(
    tmp_path: Path,
) -> None:
    learned = False

    async def score(tokens: Any) -> Any:
        return await uniform(tokens) - np.float32(0.5 * learned)

    dead, late = FakeEngine(), FakeEngine()
    sync = rig(tmp_path, dead, score=score)
    await dead.shutdown()
    await sync.publish(3, "keep")
    learned = True  # the trainer has gone on
    await sync.join(1, late)
    assert await late.version() == 3


async def test_an_engine_that_dies_while_it_joins_has_not_joined(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), FakeEngine()
    await sync.publish(3, "keep")
    await late.shutdown()
    with pytest.raises(EngineLostError):
        await sync.join(1, late)
    await sync.publish(4, "keep")
    assert sync.lost == {}


async def test_a_stuck_trainer_ends_at_the_deadline(tmp_path: Path) -> None:
    async def stuck(tokens: Any) -> Any:
        await asyncio.sleep(60)

    with pytest.raises(RunError, match=r"the trainer could not score the canary within sync\.timeout_s = 0\.05 s"):
        await rig(tmp_path, FakeEngine(), score=stuck, timeout_s=0.05).publish(1, "keep")


@pytest.mark.parametrize(
    "death", [EngineError("its core died"), RunError("engine 1 died: killed"), StoreError("no answer")]
)
@pytest.mark.parametrize("other", [SyncError("wrong file"), ChainError("damaged")])
async def test_a_retryable_error_keeps_its_type(tmp_path: Path, death: Exception, other: Exception) -> None:
    with pytest.raises(type(death), match=r"2 of 3 engines did not adopt version 1: .*; engine 1.*") as caught:
        await rig(tmp_path, Refusing(other), Refusing(death), FakeEngine()).publish(1, "keep")
    assert isinstance(caught.value, RETRYABLE)
    assert caught.value.__cause__ is death
    assert "engine 1: engine 1" not in str(caught.value)


async def test_an_engine_that_dies_while_it_scores_is_named(tmp_path: Path) -> None:
    class Dying(FakeEngine):
        async def score(self, token_ids: Any) -> Any:
            raise EngineError("its core died")

    with pytest.raises(EngineError, match="1 of 2 engines did not score the canary: engine 1: its core died"):
        await rig(tmp_path, FakeEngine(), Dying()).publish(1, "keep")


async def test_a_gap_above_the_bound_names_engine_gap_and_worst_token(tmp_path: Path) -> None:
    async def other(tokens: Any) -> Any:
        return np.array([-4.1589, -4.1589, -9.1589, -4.1589, -4.1589], dtype=np.float32)

    with pytest.raises(
        SyncError, match=r"engine 0 .* 1\.0000 in the mean, allowed is 0\.5.*; token 3 at 3: trainer -9"
    ):
        await rig(tmp_path, FakeEngine(), score=other).publish(1, "keep")


async def test_nan_does_not_pass_the_canary(tmp_path: Path) -> None:
    async def broken(tokens: Any) -> Any:
        return np.full(len(tokens) - 1, np.nan, dtype=np.float32)

    with pytest.raises(SyncError, match="nan in the mean"):
        await rig(tmp_path, FakeEngine(), score=broken).publish(1, "keep")


async def test_first_publication_shows_what_rounding_may_cost(tmp_path: Path) -> None:
    shift = 0.0

    async def shifted(tokens: Any) -> Any:
        return await uniform(tokens) + np.float32(shift)

    fine, coarse = (rig(tmp_path / name, FakeEngine(), score=shifted) for name in ("fine", "coarse"))
    await fine.publish(0, "keep")
    shift = 0.02
    await coarse.publish(0, "keep")
    with pytest.raises(SyncError, match=r"0\.0200 in the mean, allowed is 0\.01"):
        await fine.publish(1, "keep")
    shift = 0.0
    assert (await coarse.publish(1, "keep"))["sync/canary_gap"] == 0.0  # and says nothing of what is rounding
    shift = 0.2
    assert (await coarse.publish(2, "keep"))["sync/canary_gap"] == pytest.approx(0.2, abs=1e-6)


async def test_the_gap_is_that_of_the_widest_engine(tmp_path: Path) -> None:
    engines = Shifted(0.01), Shifted(0.03), Shifted(0.02)
    metrics = await rig(tmp_path, *engines).publish(1, "keep")
    assert metrics["sync/canary_gap"] == pytest.approx(0.03, abs=1e-6)


async def test_an_engine_that_joins_late_is_compared_with_the_trainer_too(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), Shifted(0.3)
    await sync.publish(4, "keep")
    with pytest.raises(SyncError, match=r"engine 7 computes other log-probs.* 0\.3000 in the mean"):
        await sync.join(7, late)
    await sync.publish(5, "keep")
    assert await late.version() == 4


async def test_only_the_first_publication_tells_what_rounding_may_cost(tmp_path: Path) -> None:
    shift = 0.02

    async def shifted(tokens: Any) -> Any:
        return await uniform(tokens) + np.float32(shift)

    sync = rig(tmp_path, FakeEngine(), score=shifted)
    for version, shift in enumerate((0.02, 0.0, 0.2)):
        gap = (await sync.publish(version, "keep"))["sync/canary_gap"]
        assert gap == pytest.approx(shift, abs=1e-6)


async def test_a_publication_without_engines_tells_nothing_of_rounding(tmp_path: Path) -> None:
    async def shifted(tokens: Any) -> Any:
        return await uniform(tokens) + np.float32(0.02)

    dead, late = FakeEngine(), FakeEngine()
    sync = rig(tmp_path, dead, score=shifted)
    await dead.shutdown()
    await sync.publish(0, "keep")
    await sync.join(1, late)
    assert await late.version() == 0


async def test_the_token_that_is_no_number_is_named_first(tmp_path: Path) -> None:
    async def broken(tokens: Any) -> Any:
        return np.array([-9.0, -4.1589, np.nan, -4.1589, -8.0], dtype=np.float32)

    with pytest.raises(SyncError, match=r"; token 3 at 3: trainer nan, .*token 1 at 1: .*token 5 at 5"):
        await rig(tmp_path, FakeEngine(), score=broken).publish(1, "keep")


async def test_no_bound_means_no_canary(tmp_path: Path) -> None:
    async def broken(tokens: Any) -> Any:
        raise AssertionError("scored")

    metrics = await rig(tmp_path, FakeEngine(), score=broken, canary_max_gap=None).publish(1, "keep")
    assert "sync/canary_gap" not in metrics  # 0 would say that they agree


async def test_room_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    sync = rig(tmp_path, FakeEngine(), expected_nbytes=1 << 60)
    with pytest.raises(SyncError, match=rf"{1 << 60} bytes needed, \d+ free"):
        await sync.publish(1, "keep")
    assert list((tmp_path / "shm").iterdir()) == []


async def test_weights_that_turn_out_not_to_fit_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    async def full(path: Path) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sync = exporting(tmp_path, full)
    with pytest.raises(SyncError, match=r"an unknown number of bytes needed, .* enlarge /dev/shm"):
        await sync.publish(1, "keep")


async def test_an_engine_that_joins_late_gets_the_newest_version_and_all_later_ones(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), FakeEngine()
    await sync.publish(4, "keep")
    await sync.join(1, late)
    assert await late.version() == 4
    await sync.publish(7, "keep")
    assert await late.version() == 7


async def test_an_engine_that_joins_during_a_publication_ends_at_its_version(tmp_path: Path) -> None:
    early, late = Gated(), FakeEngine()
    sync = rig(tmp_path, early)
    early.gate.set()
    await sync.publish(4, "keep")
    early.gate.clear()
    early.asked.clear()
    publication = asyncio.create_task(sync.publish(7, "keep"))
    await early.asked.wait()
    joining = asyncio.create_task(sync.join(1, late))
    await settle()
    early.gate.set()
    await asyncio.gather(publication, joining)
    assert await late.version() == 7


async def test_the_trainer_may_learn_on_as_soon_as_a_version_is_exported_and_is_asked_nothing_after(
    tmp_path: Path,
) -> None:
    engine, exported, asked = Gated(), asyncio.Event(), list[bool]()

    async def score(tokens: Any) -> Any:
        asked.append(exported.is_set())
        return await uniform(tokens)

    async def export(path: Path) -> int:
        asked.append(exported.is_set())
        return await write(path)

    source = FakeWeights(export, score)
    transport = SharedMemoryTransport(tmp_path / "shm", source)
    sync = SyncRig(Synchronizer(SyncConfig(), transport, source, CANARY), engine)
    publication = asyncio.create_task(sync.publish(4, "keep", exported.set))
    await exported.wait()
    assert await engine.version() == 0
    await engine.asked.wait()
    engine.gate.set()
    await publication
    await sync.join(1, FakeEngine())
    assert asked == [False, False]


class Ended(Gated):
    """Its files are taken away while it adopts, as of an engine that is retired then."""

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        self.asked.set()
        await self.gate.wait()
        raise FileNotFoundError("received/v4.safetensors")


async def test_an_engine_that_leaves_in_the_middle_of_an_adoption_does_not_fail_it(tmp_path: Path) -> None:
    stays, leaves = FakeEngine(), Ended()
    sync = rig(tmp_path, stays, leaves)
    publication = asyncio.create_task(sync.publish(4, "keep"))
    await leaves.asked.wait()
    del sync.engines[EngineId(1)]
    leaves.gate.set()
    await publication
    assert await stays.version() == 4
    assert sync.lost == {}


class Other(FakeEngine):
    """Computes something else."""

    async def score(self, token_ids: Any) -> Any:
        return await super().score(token_ids) - np.float32(2)


async def test_an_engine_that_computes_something_else_does_not_join(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), Other()
    await sync.publish(4, "keep")
    with pytest.raises(SyncError, match="engine 1 computes other log-probs than the trainer"):
        await sync.join(1, late)
    await sync.publish(5, "keep")
    assert await late.version() == 4


class Damaged:
    """A transport whose versions cannot be read, until they are written whole."""

    async def export(self) -> None:
        """Nothing is in it yet."""

    async def send(self, version: int) -> Publication:
        self.version = version
        return Publication(WeightUpdate(version, "damaged", 1), {"sync/full": 0.0})

    async def snapshot(self) -> Publication:
        return Publication(WeightUpdate(self.version, "whole", 1), {"sync/full": 1.0})

    def release(self, update: WeightUpdate) -> None:
        """Keep everything."""

    def close(self) -> None:
        """Nothing to free."""


class Slow(Damaged):
    """It takes long to get a version out of it."""

    async def send(self, version: int) -> Publication:
        await asyncio.sleep(60)
        return await super().send(version)


async def test_the_trainer_learns_on_while_a_version_is_sent() -> None:
    exported = asyncio.Event()
    sync = SyncRig(Synchronizer(SyncConfig(), Slow(), FakeWeights(), CANARY), FakeEngine())
    publication = asyncio.create_task(sync.publish(4, "keep", exported.set))
    await exported.wait()
    assert asyncio.get_running_loop().time() < 1.0
    await publication


async def test_a_version_that_is_not_sent_in_time_fails_its_publication() -> None:
    sync = SyncRig(Synchronizer(SyncConfig(timeout_s=0.5), Slow(), FakeWeights(), CANARY), FakeEngine())
    late = r"the trainer could not publish version 4 within sync\.timeout_s = 0\.5 s"
    with pytest.raises(RunError, match=late):
        await sync.publish(4, "keep")


class Reading(FakeEngine):
    """Cannot read what is damaged, except while the store was well."""

    def __init__(self, *, well: bool = False) -> None:
        super().__init__()
        self.well, self.read = well, list[str]()

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        self.read.append(update.path)
        if update.path == "damaged" and not self.well:
            raise ChainError("a part is missing")
        await super().update_weights(update, mode)


async def test_what_one_engine_found_damaged_no_other_that_joins_is_given() -> None:
    early, one, another = Reading(well=True), Reading(), Reading()
    sync = SyncRig(Synchronizer(SyncConfig(), Damaged(), FakeWeights(), CANARY), early)
    await sync.publish(4, "keep")
    await sync.join(1, one)
    await sync.join(2, another)
    assert (early.read, one.read, another.read) == (["damaged"], ["damaged", "whole"], ["whole"])
    assert [await engine.version() for engine in (early, one, another)] == [4, 4, 4]


async def test_metrics_are_of_what_the_engines_adopted() -> None:
    for well, full in ((True, 0.0), (False, 1.0)):
        metrics = await SyncRig(
            Synchronizer(SyncConfig(), Damaged(), FakeWeights(), CANARY), Reading(well=well)
        ).publish(4, "keep")
        assert metrics["sync/full"] == full


async def test_the_gap_of_an_engine_that_joined_is_told_with_the_next_version(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), Shifted(0.005)
    await sync.publish(4, "keep")
    await sync.join(1, late)
    late.shift = 0.0
    gaps = [(await sync.publish(version, "keep"))["sync/canary_gap"] for version in (5, 6)]
    assert gaps == pytest.approx([0.005, 0.0], abs=1e-6)


async def test_an_engine_that_joins_when_the_run_ends_is_asked_nothing(tmp_path: Path) -> None:
    sync, late = rig(tmp_path, FakeEngine()), Gated()
    await sync.publish(4, "keep")
    joining = asyncio.create_task(sync.join(1, late))
    await asyncio.sleep(0)
    joining.cancel()
    await asyncio.wait([joining])
    gc.collect()  # a call that was made and not begun would be told of now, as a warning
    assert (joining.cancelled(), late.asked.is_set()) == (True, False)


async def test_a_publication_waits_for_an_engine_that_joins(tmp_path: Path) -> None:
    early, late = FakeEngine(), Gated()
    sync = rig(tmp_path, early)
    await sync.publish(4, "keep")
    joining = asyncio.create_task(sync.join(1, late))
    await late.asked.wait()
    publication = asyncio.create_task(sync.publish(7, "keep"))
    await settle()
    assert await early.version() == 4
    late.gate.set()
    await asyncio.gather(publication, joining)
    assert [await engine.version() for engine in (early, late)] == [7, 7]


async def test_an_engine_that_has_left_gets_no_version_any_more(tmp_path: Path) -> None:
    stays, leaves = FakeEngine(), FakeEngine()
    sync = rig(tmp_path, stays, leaves)
    await sync.publish(1, "keep")
    del sync.engines[EngineId(1)]
    await sync.publish(2, "keep")
    assert [await engine.version() for engine in (stays, leaves)] == [2, 1]


async def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "v9.safetensors").write_bytes(b"old weights")
    await rig(tmp_path, FakeEngine()).publish(1, "keep")
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["v1.safetensors"]


async def test_close_frees_the_memory(tmp_path: Path) -> None:
    sync = rig(tmp_path, FakeEngine())
    await sync.publish(1, "keep")
    sync.close()
    assert not (tmp_path / "shm").exists()


async def test_an_export_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    async def cut(path: Path) -> int:
        return path.write_bytes(b"weights") + 1

    sync = exporting(tmp_path, cut)
    with pytest.raises(SyncError, match="announced 8 bytes"):
        await sync.publish(1, "keep")
