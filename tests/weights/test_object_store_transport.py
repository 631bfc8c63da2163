"""Weights on their way through a real S3 server: full snapshots, deltas, and what may go wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sync_rig import SyncRig

from tidemill.config.asynchrony import SyncConfig
from tidemill.errors import ChainError, EngineError, StoreError, StoreRefusedError, SyncError, is_retryable
from tidemill.fakes import FakeEngine
from tidemill.protocols import PauseMode, WeightUpdate
from tidemill.store.object_store import ObjectStore
from tidemill.weights.download import WeightDownloader, reserve
from tidemill.weights.synchronizer import Synchronizer
from tidemill.weights.transport import ObjectStoreTransport, Publication
from tidemill.weights.upload import WeightUploader, locations

PREFIX = "runs/tiny/weights"
CANARY = np.arange(6, dtype=np.int32)


def make_weights(version: int) -> dict[str, torch.Tensor]:
    """Deterministic in `version`; neighbours differ in a few elements of some tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed": torch.randn(200, 16, generator=generator).to(torch.bfloat16),
        "layer.weight": torch.randn(64, 64, generator=generator),
        "frozen": torch.randn(50, generator=generator),
        "empty": torch.zeros(0, 3),
        "steps": torch.tensor(version),
    }
    for step in range(version):
        tensors["embed"][step % 200] += 0.5
        tensors["layer.weight"][step % 64] *= 1.25
    return tensors


@dataclass
class Rig:
    """A trainer and the engines of one host, with the store between them."""

    store: ObjectStore
    folder: Path
    full_every: int = 4
    uploader: WeightUploader = field(init=False)
    files: dict[int, bytes] = field(default_factory=dict)
    downloaders: list[WeightDownloader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uploader = WeightUploader(PREFIX, self.full_every)

    def publish(self, version: int, tensors: dict[str, torch.Tensor] | None = None) -> Publication:
        path = self.folder / "export.safetensors"
        save_file(make_weights(version) if tensors is None else tensors, path, metadata={"format": "pt"})
        self.files[version] = path.read_bytes()
        return self.uploader.publish(self.store, version, path)

    def downloader(
        self, name: str = "received", store: ObjectStore | None = None, timeout_s: float = 120
    ) -> WeightDownloader:
        @contextmanager
        def opened() -> Iterator[ObjectStore]:
            yield store or self.store

        self.downloaders.append(WeightDownloader(self.folder / name, opened, timeout_s))
        return self.downloaders[-1]

    def keys(self, serial: int) -> list[str]:
        return [item.key for item in self.store.list(self.uploader.first.at(serial).key)]

    def damage(self, key: str, position: int) -> None:
        data = bytearray(self.store.get_bytes(key))
        data[position] ^= 1
        self.store.put_bytes(key, bytes(data))


@pytest.fixture
def rig(seaweedfs: ObjectStore, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(seaweedfs, tmp_path)
    yield rig
    for downloader in rig.downloaders:
        downloader.close()


async def fetched(downloader: WeightDownloader, update: WeightUpdate) -> bytes:
    async with downloader.local(update) as local:
        data = Path(local.path).read_bytes()
        assert (local.version, local.nbytes) == (update.version, len(data))
        return data


async def test_every_version_arrives_byte_for_byte(rig: Rig) -> None:
    downloader, full = rig.downloader(), []
    for version in range(10):
        publication = rig.publish(version)
        assert await fetched(downloader, publication.update) == rig.files[version]
        full.append(publication.metrics["sync/full"])
    assert full == [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


async def test_it_works_on_any_s3_server(store: ObjectStore, tmp_path: Path) -> None:
    rig = Rig(store, tmp_path)
    downloader = rig.downloader()
    for version in range(5):
        assert await fetched(downloader, rig.publish(version).update) == rig.files[version]
    downloader.close()


def test_a_delta_is_a_small_share_of_a_snapshot(rig: Rig) -> None:
    snapshot, delta = rig.publish(0).metrics, rig.publish(1).metrics
    assert delta["sync/stored_bytes"] < 0.05 * snapshot["sync/stored_bytes"]


async def test_large_weights_travel_in_several_parts(rig: Rig) -> None:
    downloader = rig.downloader()
    for version in range(2):
        tensors = {name: torch.full((5 << 20,), 1.0 + version) for name in "abc"}
        assert await fetched(downloader, rig.publish(version, tensors).update) == rig.files[version]
    assert [key.rpartition("/")[2] for key in rig.keys(1)] == ["manifest", "part-0000", "part-0001", "part-0002"]


@pytest.mark.parametrize("versions", [(0, 3), (0, 5), (1, 2, 7), (0, 11)])
async def test_a_downloader_may_skip_versions(rig: Rig, versions: tuple[int, ...]) -> None:
    downloader = rig.downloader()
    for version in range(12):
        update = rig.publish(version).update
        if version in versions:
            assert await fetched(downloader, update) == rig.files[version]


@pytest.mark.parametrize("newest", [0, 3, 4, 6])
async def test_a_downloader_that_has_nothing_catches_up(rig: Rig, newest: int) -> None:
    update = [rig.publish(version) for version in range(newest + 1)][-1].update
    assert await fetched(rig.downloader(), update) == rig.files[newest]


async def test_only_the_newest_file_stays_in_memory(rig: Rig) -> None:
    downloader = rig.downloader()
    for version in range(6):
        await fetched(downloader, rig.publish(version).update)
    assert [path.name for path in downloader.folder.glob("*.safetensors")] == [
        downloader.path(location_of(rig, 6)).name
    ]
    assert not (rig.folder / "export.safetensors").exists()


def location_of(rig: Rig, serial: int) -> Any:
    return rig.uploader.first.at(serial)


def test_versions_before_the_previous_snapshot_are_deleted(rig: Rig) -> None:
    for version in range(10):
        rig.publish(version)
    assert [location.serial for location in locations(rig.store, PREFIX)] == [5, 6, 7, 8, 9, 10]


def test_a_deletion_that_fails_leaves_no_version_that_lacks_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(prefix: str) -> int:
        raise StoreError("the store is away")

    for version in range(8):
        rig.publish(version)
    monkeypatch.setattr(rig.store, "delete_prefix", fail)
    rig.publish(8)  # a snapshot, after which the oldest versions go
    assert not any(key.endswith("/manifest") for key in rig.keys(1))
    assert any(key.endswith("/manifest") for key in rig.keys(9))


async def test_another_attempt_starts_over_and_deletes_the_last_one(rig: Rig) -> None:
    downloader = rig.downloader()
    await fetched(downloader, rig.publish(5).update)
    again = Rig(rig.store, rig.folder)
    again.publish(5, make_weights(40))
    assert await fetched(downloader, again.publish(6).update) == again.files[6]
    assert {location.attempt for location in locations(rig.store, PREFIX)} == {again.uploader.first.attempt}


async def test_tensors_of_another_shape_come_as_a_snapshot(rig: Rig) -> None:
    downloader = rig.downloader()
    await fetched(downloader, rig.publish(0).update)
    publication = rig.publish(1, {"embed": torch.ones(3)})
    assert publication.metrics["sync/full"] == 1
    assert await fetched(downloader, publication.update) == rig.files[1]


class Crashing(ObjectStore):
    """Breaks down before a manifest is written."""

    def put_bytes(self, key: str, data: bytes) -> Any:
        if key.endswith("/manifest"):
            raise StoreError("the machine went down")
        return super().put_bytes(key, data)


async def test_a_version_without_a_manifest_does_not_exist(rig: Rig) -> None:
    first = rig.publish(0)
    sound, rig.store = rig.store, Crashing(rig.store.client, rig.store.endpoint, rig.store.bucket)
    with pytest.raises(StoreError, match="went down"):
        rig.publish(1)
    assert [key.rpartition("/")[2] for key in rig.keys(2)] == ["part-0000"]
    rig.store, halfway = sound, WeightUpdate(1, sound.uri(location_of(rig, 2).key), first.update.nbytes)
    with pytest.raises(ChainError, match=r"cannot download version 1 from the store.*00000002/manifest"):
        await fetched(rig.downloader("late"), halfway)
    assert await fetched(rig.downloader(), first.update) == rig.files[0]
    assert await fetched(rig.downloader(), rig.publish(2).update) == rig.files[2]


@pytest.mark.parametrize(("position", "kept"), [(0, None), (100, None), (-100, None), (0, -5), (0, 0)])
async def test_a_damaged_base_is_noticed_and_replaced(
    rig: Rig, caplog: pytest.LogCaptureFixture, position: int, kept: int | None
) -> None:
    downloader = rig.downloader()
    await fetched(downloader, rig.publish(0).update)
    path = downloader.path(location_of(rig, 1))
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data[:kept])
    assert await fetched(downloader, rig.publish(1).update) == rig.files[1]
    assert "cannot be made from" in caplog.text


async def test_a_lost_base_is_fetched_again(rig: Rig) -> None:
    downloader = rig.downloader()
    await fetched(downloader, rig.publish(0).update)
    downloader.path(location_of(rig, 1)).unlink()
    assert await fetched(downloader, rig.publish(1).update) == rig.files[1]


@pytest.mark.parametrize("serial", [1, 2])
async def test_any_damaged_byte_in_the_store_is_noticed(rig: Rig, serial: int) -> None:
    update = [rig.publish(0), rig.publish(1)][-1].update
    for key in rig.keys(serial):
        size = len(rig.store.get_bytes(key))
        for position in {*range(0, size, size // 20 + 1), size - 1}:
            rig.damage(key, position)
            with pytest.raises(ChainError, match="cannot download version 1 from the store"):
                await fetched(rig.downloader(), update)
            rig.damage(key, position)
    assert await fetched(rig.downloader(), update) == rig.files[1]


@pytest.mark.parametrize("kept", [0, 1, 17, -1])
async def test_any_object_in_the_store_that_was_cut_short_is_noticed(rig: Rig, kept: int) -> None:
    update = [rig.publish(0), rig.publish(1)][-1].update
    for key in [*rig.keys(1), *rig.keys(2)]:
        whole = rig.store.get_bytes(key)
        rig.store.put_bytes(key, whole[:kept])
        with pytest.raises(ChainError, match="cannot download version 1 from the store"):
            await fetched(rig.downloader(), update)
        rig.store.put_bytes(key, whole)
    assert await fetched(rig.downloader(), update) == rig.files[1]


async def test_the_error_names_version_tensor_object_and_remedy(rig: Rig) -> None:
    update = rig.publish(7).update
    key = rig.keys(1)[-1]
    rig.damage(key, 100)
    with pytest.raises(ChainError, match=rf"tensor \S+ of version 7 in s3://\S+{key} is damaged.*full snapshot"):
        await fetched(rig.downloader(), update)
    assert not list(rig.downloader().folder.glob(".*.part"))


class Receiving(FakeEngine):
    """Stands for an engine with its downloader; keeps what it was given."""

    def __init__(self, downloader: WeightDownloader) -> None:
        super().__init__()
        self.downloader, self.loaded = downloader, b""

    async def update_weights(self, update: WeightUpdate, mode: PauseMode) -> None:
        self.loaded = await fetched(self.downloader, update)
        await super().update_weights(update, mode)


class Trainer:
    """Its weights are made when they are uploaded."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def write_weights(self) -> None:
        pass

    async def upload_weights(self, version: int) -> Publication:
        return await asyncio.to_thread(self.rig.publish, version)

    async def upload_snapshot(self) -> Publication:
        return await asyncio.to_thread(self.rig.uploader.snapshot, self.rig.store)

    async def score(self, tokens: Any) -> Any:
        return np.full(len(tokens) - 1, -math.log(64), dtype=np.float32)


def synced(rig: Rig, *engines: FakeEngine) -> SyncRig:
    source = Trainer(rig)
    transport = ObjectStoreTransport(source, rig.store, PREFIX)
    return SyncRig(Synchronizer(SyncConfig(), transport, source, CANARY), *engines)


async def test_engines_on_two_hosts_adopt_every_version(rig: Rig) -> None:
    engines = [Receiving(rig.downloader(name)) for name in ("here", "here", "there")]
    sync = synced(rig, *engines)
    for serial, version in enumerate((0, 1, 3, 9), start=1):
        metrics = await sync.publish(version, "keep")
        assert [engine.loaded for engine in engines] == 3 * [rig.files[version]]
        assert metrics["sync/bytes"] == len(rig.files[version])
        parts = [item for item in rig.store.list(location_of(rig, serial).key) if "/part-" in item.key]
        assert metrics["sync/stored_bytes"] == sum(part.nbytes for part in parts)
        assert metrics["sync/full"] == (version == 0)
    sync.close()
    assert rig.store.list(PREFIX) == ()


async def test_an_engine_that_joins_late_adopts_the_newest_version(rig: Rig) -> None:
    sync = synced(rig, Receiving(rig.downloader()))
    for version in range(3):
        await sync.publish(version, "keep")
    late = Receiving(rig.downloader("late"))
    await sync.join(9, late)
    assert (await late.version(), late.loaded) == (2, rig.files[2])


async def test_a_broken_chain_is_mended_by_a_snapshot(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    sync = synced(rig, Receiving(rig.downloader()))
    for version in range(3):
        await sync.publish(version, "keep")
    rig.store.delete_prefix(location_of(rig, 2).key)
    late = Receiving(rig.downloader("late"))
    await sync.join(9, late)
    assert (await late.version(), late.loaded) == (2, rig.files[2])
    assert "publishing version 2 as a snapshot" in caplog.text
    await sync.publish(3, "keep")
    assert late.loaded == rig.files[3]


async def test_a_store_that_fails_is_an_error_of_the_version(rig: Rig) -> None:
    sync = synced(rig, Receiving(rig.downloader()))
    await sync.publish(0, "keep")
    rig.store = Crashing(rig.store.client, rig.store.endpoint, rig.store.bucket)
    with pytest.raises(StoreError, match=r"version 1 could not be published .* the machine went down"):
        await sync.publish(1, "keep")


class Counting(ObjectStore):
    """Notes what is read."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.read: list[str] = []

    def get_bytes(self, key: str) -> bytes:
        self.read.append(key)
        return super().get_bytes(key)


async def test_a_downloader_reads_no_more_than_what_changed_since_its_base(rig: Rig) -> None:
    counting = Counting(rig.store)
    downloader = rig.downloader(store=counting)
    read: dict[int, list[str]] = {}
    for version in range(5):
        update = rig.publish(version).update
        if version != 2:
            counting.read = []
            await fetched(downloader, update)
            read[version] = sorted(counting.read)
    assert read[3] == [key for serial in (3, 4) for key in rig.keys(serial)]
    assert read[4] == rig.keys(5)  # a snapshot, which needs no base


async def test_engines_of_one_host_fetch_once(rig: Rig) -> None:
    update = rig.publish(0).update
    counting = Counting(rig.store)
    downloaders = [rig.downloader(store=counting) for _ in range(4)]
    assert await asyncio.gather(*(fetched(r, update) for r in downloaders)) == 4 * [rig.files[0]]
    assert sorted(counting.read) == sorted(set(counting.read))


async def test_a_file_that_is_being_loaded_stays(rig: Rig) -> None:
    old, new = rig.publish(0).update, rig.publish(1).update
    async with rig.downloader().local(old) as loading:
        with pytest.raises(EngineError, match=r"version 1 waited .* more than 0\.1 s, because another engine"):
            await fetched(rig.downloader(timeout_s=0.1), new)
        assert Path(loading.path).read_bytes() == rig.files[0]
    assert await fetched(rig.downloader(), new) == rig.files[1]


async def test_an_engine_that_takes_long_to_load_a_version_holds_up_no_other_of_its_host(rig: Rig) -> None:
    """With `asynchrony.pause_mode: wait` it first lets its groups finish."""
    update = rig.publish(0).update
    async with rig.downloader().local(update), rig.downloader(timeout_s=0.0).local(update) as local:
        assert Path(local.path).read_bytes() == rig.files[0]


class Away(ObjectStore):
    """Does not answer while it has an error to raise."""

    def __init__(self, store: ObjectStore, *errors: StoreError) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.errors = list(errors)

    def get_bytes(self, key: str) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return super().get_bytes(key)


async def test_a_store_that_is_away_for_an_engine_costs_it_no_base_and_the_version_another_try(rig: Rig) -> None:
    away = Away(rig.store)
    engine = Receiving(rig.downloader(store=away))
    sync = synced(rig, engine, Receiving(rig.downloader("there")))
    await sync.publish(0, "keep")
    away.errors = [StoreError("no answer")]
    metrics = await sync.publish(1, "keep")
    assert (engine.loaded, metrics["sync/full"]) == (rig.files[1], 1.0)


@pytest.mark.parametrize(("error", "retryable"), [(StoreError("no answer"), True), (StoreRefusedError("no"), False)])
async def test_a_store_that_stays_away_for_an_engine_is_no_harm_to_the_weights(
    rig: Rig, error: StoreError, retryable: bool
) -> None:
    """Another attempt at the run may succeed, unless the keys are wrong; so may another late engine."""
    away = Away(rig.store)
    downloader = rig.downloader(store=away)
    sync = synced(rig, Receiving(downloader))
    await sync.publish(0, "keep")
    away.errors = [error] * 100
    with pytest.raises(StoreError if retryable else SyncError, match="did not adopt version 1: engine 0: no") as caught:
        await sync.publish(1, "keep")
    assert not isinstance(caught.value, ChainError)
    assert is_retryable(caught.value) == retryable
    assert downloader.path(location_of(rig, 1)).exists()
    late = Receiving(rig.downloader("late", store=Away(rig.store, *[error] * 100)))
    with pytest.raises(StoreError if retryable else SyncError, match="did not adopt version 0 late: engine 9: no"):
        await sync.join(9, late)


async def test_keys_that_are_refused_stay_that_where_a_version_is_published(rig: Rig) -> None:
    class Refused(Trainer):
        async def upload_weights(self, version: int) -> Publication:
            raise StoreRefusedError("wrong keys")

        async def upload_snapshot(self) -> Publication:
            raise StoreRefusedError("wrong keys")

    transport = ObjectStoreTransport(Refused(rig), rig.store, PREFIX)
    for publishing in (transport.send(3), transport.snapshot()):
        with pytest.raises(StoreRefusedError, match=r"published .*: wrong keys"):
            await publishing


async def test_the_last_engine_of_a_host_frees_its_memory(rig: Rig) -> None:
    update = rig.publish(0).update
    first, second = rig.downloader(), rig.downloader()
    await fetched(first, update)
    first.close()
    assert list(second.folder.glob("*.safetensors"))
    second.close()
    assert not list(second.folder.glob("*.safetensors"))


def test_memory_is_taken_before_anything_is_written_to_it(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=rf"no room for the weights in {tmp_path}: {1 << 55} bytes needed"):
        reserve(tmp_path / "weights", 1 << 55)
