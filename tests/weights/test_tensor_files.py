"""Weights in memory that is written again and again, and read meanwhile."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tidemill.errors import SyncError
from tidemill.protocols import WeightUpdate
from tidemill.weights.tensor_files import MappedWeights
from tidemill.weights.transport import SharedMemoryTransport


def weights(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), value), "b.c": torch.full((3, 5), value)}


class Trainer:
    """Exports what it has."""

    def __init__(self, folder: Path, size: int = 1000) -> None:
        self.files, self.size, self.value = MappedWeights(), size, 0.0
        self.transport = SharedMemoryTransport(folder / "transport", self)

    async def export(self, path: Path) -> int:
        return self.files.write(path, weights(self.value, self.size), torch.float32)

    def publish(self, version: int) -> WeightUpdate:
        self.value = float(version)
        asyncio.run(self.transport.export())
        return asyncio.run(self.transport.send(version)).update


def values(files: MappedWeights, update: WeightUpdate) -> set[float]:
    with files.reading(Path(update.path), update.nbytes) as mapped:
        return {value for tensor in mapped.tensors.values() for value in tensor.unique().tolist()}


SHAPES = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=9).filter(lambda name: name != "__metadata__"),
    st.lists(st.integers(0, 4), max_size=3),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.integers(0, 9))
def test_what_is_written_is_a_safetensors_file_of_the_cast_tensors(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], dtype: torch.dtype, seed: int
) -> None:
    path = tmp_path_factory.mktemp("written") / "w.safetensors"
    torch.manual_seed(seed)
    writer, reader = MappedWeights(), MappedWeights()
    for _ in range(2):  # the second time in place
        parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        nbytes = writer.write(path, parameters, dtype)
        assert nbytes == path.stat().st_size
        expected = {name: parameter.detach().to(dtype) for name, parameter in parameters.items()}
        with reader.reading(path, nbytes) as mapped:
            for found in (load_file(path), mapped.tensors):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(writer.kept) == len(reader.kept) == 1


def test_two_files_take_turns_and_stay_mapped(tmp_path: Path) -> None:
    trainer, engine = Trainer(tmp_path), MappedWeights()
    inodes, last = [], None
    for version in (1, 2, 5, 6, 9):  # an engine may skip versions
        update = trainer.publish(version)
        assert values(engine, update) == {float(version)}
        inodes.append(Path(update.path).stat().st_ino)
        if last:
            trainer.transport.release(last)
        last = update
    assert inodes[0] != inodes[1]
    assert inodes == (inodes[:2] * 3)[:5]
    assert len(engine.kept) == len(trainer.files.kept) == 2


def test_a_file_that_is_still_read_is_not_written(tmp_path: Path) -> None:
    trainer, slow = Trainer(tmp_path), MappedWeights()
    first = trainer.publish(1)
    with slow.reading(Path(first.path), first.nbytes) as mapped:
        second = trainer.publish(2)
        trainer.transport.release(first)
        third = trainer.publish(3)
        assert mapped.tensors["a"].unique().tolist() == [1.0]
    assert values(slow, second) == {2.0}
    assert values(slow, third) == {3.0}
    assert sorted(path.name for path in (tmp_path / "transport").iterdir()) == ["v2.safetensors", "v3.safetensors"]
    assert len(slow.kept) == 2  # the memory of the first one is free


def test_a_version_that_was_replaced_cannot_be_read(tmp_path: Path) -> None:
    trainer, late = Trainer(tmp_path), MappedWeights()
    first = trainer.publish(1)
    assert values(late, first) == {1.0}
    trainer.publish(2)
    trainer.transport.release(first)
    with pytest.raises(FileNotFoundError):
        values(late, first)


def test_an_engine_that_opened_a_version_and_then_waited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, late, lock = Trainer(tmp_path), MappedWeights(), fcntl.flock
    first = trainer.publish(1)

    def wait(file: Any, kind: int) -> None:
        monkeypatch.undo()
        trainer.publish(2)
        trainer.transport.release(first)
        trainer.publish(3)
        Path(first.path).write_bytes(bytes(first.nbytes))  # even if there is one of its name again
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", wait)
    with pytest.raises(SyncError, match="was replaced by a newer version"):
        values(late, first)


def test_reading_and_writing_at_random_never_mixes_versions(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, size=300_000)
    announced, seen, faults = [trainer.publish(0)], set(), []
    done = threading.Event()

    def engine(seed: int) -> None:
        files, draw = MappedWeights(), random.Random(seed)
        while not done.is_set():
            update = draw.choice(announced[-3:])  # also those that are gone
            try:
                found = values(files, update)
            except (SyncError, FileNotFoundError):
                continue
            seen.add(update.version)
            if found != {float(update.version)}:
                faults.append((update.version, found))

    threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, 10_000):
        announced.append(trainer.publish(version))
        trainer.transport.release(announced[-2])
        if version >= 40 and len(seen) >= 3:  # a busy machine may let no reader go on for long
            break
    done.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(seen) >= 3


def test_weights_cannot_be_changed_by_who_reads_them(tmp_path: Path) -> None:
    update = Trainer(tmp_path).publish(1)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        with MappedWeights().reading(Path(update.path), update.nbytes) as mapped:
            mapped.tensors["a"].add_(1)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert values(MappedWeights(), update) == {1.0}


@pytest.mark.parametrize(
    ("parameters", "dtype"),
    [
        (weights(2), torch.bfloat16),
        ({**weights(2), "a": torch.full((10, 100), 2.0)}, torch.float32),
        ({"a": torch.full((1015,), 2.0)}, torch.float32),
        ({"a": torch.full((1000,), 2.0), "b": torch.full((3, 5), 2.0)}, torch.float32),
        ({**weights(2), "c": torch.full((1,), 2.0)}, torch.float32),
    ],
    ids=["dtype", "shape", "fewer", "name", "more"],
)
def test_other_tensors_get_another_file(
    tmp_path: Path, parameters: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    files, path = MappedWeights(), tmp_path / "w.safetensors"
    files.write(path, weights(1), torch.float32)
    before = path.stat().st_ino
    nbytes = files.write(path, parameters, dtype)
    assert path.stat().st_ino != before
    assert path.stat().st_size == nbytes
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(path).items()} == {
        name: (tensor.shape, dtype) for name, tensor in parameters.items()
    }
    assert values(MappedWeights(), WeightUpdate(1, str(path), nbytes)) == {2.0}
    assert len(files.kept) == 1


def test_a_process_writes_into_no_file_that_it_has_not_made(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    nbytes = MappedWeights().write(path, weights(1), torch.float32)
    os.truncate(path, nbytes // 2)  # as one that was killed leaves it, with a good header
    assert MappedWeights().write(path, weights(2), torch.float32) == nbytes
    assert values(MappedWeights(), WeightUpdate(2, str(path), nbytes)) == {2.0}


@pytest.mark.parametrize("cut", [3, 9, 500])
def test_a_file_that_is_not_whole_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights(1), path)
    nbytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(cut)
    files = MappedWeights()
    with pytest.raises(SyncError, match=f"has {cut} bytes and was announced with {nbytes}"):
        values(files, WeightUpdate(1, str(path), nbytes))
    with pytest.raises(SyncError):
        values(files, WeightUpdate(1, str(path), cut))
