"""The time from a new version in the trainer to the same bytes in the engine's parameters, for every transport.

    python benchmarks/sync.py [--megabytes 10 100 500] [--repeats 5] [--memory] [--json PATH]

The same run measures a plain copy in memory, and `torch.save` + `ray.put` + `ray.get` + `torch.load`. Every method
starts with bfloat16 tensors and ends with the same loop that copies each into a parameter, all in one process and, as
in a run, in a running event loop. The loading of vLLM and the cast of the trainer's float32 weights are the same for
every method and are not included.

Between two publications every weight changes by a learning rate of 1e-6 in float32, so that a delta is as large as in
a run. The object store is the embedded server, its data on disk. Rows: name, unit, ours, other, ratio (ours over
other), medians of the passes.

`shared_memory` and the plain copy are measured first, before Ray and the object store are started: servers that still
free or write the data of another method take memory bandwidth. `--memory` stops there.

`shared_memory` costs little more than the copy, because the two files are written in turn and stay mapped on both
sides. The first touch of a page costs several times its copy: 100 MB took 60 ms into a new file, 48 to 83 ms into a
file mapped again, and 13 ms into a file that had stayed mapped; reading took 54, 31 and 11 ms. A fixed third to half
of a millisecond a version remains (two renames, two opens, two locks), so 2 MB take 0.6 ms where a copy takes 0.2. A
copy that goes through the buffer tensor by tensor is 1.2 to 1.4 times faster, but a version must be whole before an
engine takes it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from results.row import Row, write_rows

from tidemill.protocols import WeightUpdate
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store
from tidemill.weights.download import WeightDownloader
from tidemill.weights.tensor_files import MappedWeights
from tidemill.weights.transport import SharedMemoryTransport
from tidemill.weights.upload import WeightUploader

FOLDER = Path("/dev/shm")
SIDE = 1024  # a tensor has this many rows and columns: 2 MiB
LEARNING_RATE = 1e-6
COPY, COPY_EACH, RAY = "plain copy", "plain copy by tensor", "torch.save + ray"
MEMORY, DELTA, FULL = "shared_memory", "object_store, delta", "object_store, full"
WARM_UP = 2  # passes that make the files which later ones use again; in the first the delta has no base yet
Tensors = Mapping[str, torch.Tensor]


@dataclass
class Weights:
    """A trainer's weights, which move, and an engine's parameters of the same shapes."""

    megabytes: int
    weights: dict[str, torch.Tensor] = field(init=False)
    parameters: dict[str, torch.Tensor] = field(init=False)
    staging: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        count = max(1, round(self.megabytes * 1e6 / (2 * SIDE * SIDE)))
        self.masters = [torch.randn(SIDE, SIDE) * 0.02 for _ in range(count)]
        self.directions = [torch.randn(SIDE, SIDE).sign() for _ in range(count)]
        self.move()
        self.parameters, self.staging = (
            {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()} for _ in range(2)
        )

    def move(self) -> None:
        """One step of the optimizer."""
        for master, direction in zip(self.masters, self.directions, strict=True):
            master.add_(direction, alpha=LEARNING_RATE)
        self.weights = {f"layer.{n}": master.to(torch.bfloat16) for n, master in enumerate(self.masters)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """The engine's end of every method."""
        self.parameters[name].copy_(tensor)

    def check(self, way: str) -> None:
        """Fail if a method changed a bit."""
        for name, tensor in self.weights.items():
            if not torch.equal(tensor.view(torch.int16), self.parameters[name].view(torch.int16)):
                raise SystemExit(f"{way} changed {name}")


@dataclass(frozen=True)
class Result:
    """Median milliseconds by method, and the bytes that a method stored for one version."""

    median: Mapping[str, float]
    stored: Mapping[str, float]


@dataclass
class Ways:
    """Every method from the trainer's weights to the engine's parameters."""

    weights: Weights
    folder: Path
    store: ObjectStore | None

    def __post_init__(self) -> None:
        self.version = 0
        # As in a run, where a process exports to one folder and reads from one.
        self.exports, self.adopted = defaultdict(MappedWeights), defaultdict(MappedWeights)
        self.outdated: WeightUpdate | None = None
        self.transport = SharedMemoryTransport(self.folder / "transport", self)
        self.uploaders = {way: WeightUploader(f"runs/{n}", n) for way, n in ((DELTA, 1 << 30), (FULL, 1))}
        self.downloaders = {
            way: WeightDownloader(self.folder / f"{n}", self.opened, 60) for n, way in enumerate(self.uploaders)
        }
        self.stored: dict[str, float] = {}

    @contextmanager
    def opened(self) -> Iterator[ObjectStore]:
        """The store is up for the whole run."""
        yield self.store

    async def export(self, path: Path) -> int:
        """Write the weights as the trainer does."""
        return self.exports[path.parent].write(path, self.weights.weights, torch.bfloat16)

    def all(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """By name."""
        return {
            COPY: self.copy,
            COPY_EACH: self.copy_each,
            MEMORY: self.shared_memory,
            RAY: self.ray,
            DELTA: lambda: self.object_store(DELTA),
            FULL: lambda: self.object_store(FULL),
        }

    async def copy(self) -> None:
        """Copy into an existing buffer, and from there once it holds a whole version."""
        for name, tensor in self.weights.weights.items():
            self.weights.staging[name].copy_(tensor)
        for name, tensor in self.weights.staging.items():
            self.weights.load(name, tensor)

    async def copy_each(self) -> None:
        """Copy tensor by tensor, each while it is in the cache; an engine would see mixed versions."""
        for name, tensor in self.weights.weights.items():
            self.weights.load(name, self.weights.staging[name].copy_(tensor))

    async def ray(self) -> None:
        """Through Ray's object store; unpickling is restricted to tensors."""
        buffer = io.BytesIO()
        torch.save(self.weights.weights, buffer)
        received = ray.get(ray.put(buffer.getvalue()))
        for name, tensor in torch.load(io.BytesIO(received), weights_only=True).items():
            self.weights.load(name, tensor)

    async def shared_memory(self) -> None:
        """One of two files in memory, which stay mapped on both sides."""
        await self.transport.export()
        update = (await self.transport.send(self.version)).update
        self.adopt(update)
        if self.outdated:
            self.transport.release(self.outdated)
        self.outdated = update

    async def object_store(self, way: str) -> None:
        """Through S3, from an export to a fetched file."""
        path = self.folder / "export.safetensors"
        await self.export(path)
        publication = self.uploaders[way].publish(self.store, self.version, path)
        async with self.downloaders[way].local(publication.update) as local:
            self.adopt(local)
        self.stored[way] = publication.metrics["sync/stored_bytes"]

    def adopt(self, update: WeightUpdate) -> None:
        """As the engine reads a file, without vLLM's own work."""
        path = Path(update.path)
        with self.adopted[path.parent].reading(path, update.nbytes) as mapped:
            for name, tensor in mapped.tensors.items():
                self.weights.load(name, tensor)

    def close(self) -> None:
        """Free the memory."""
        for downloader in self.downloaders.values():
            downloader.close()
        self.transport.close()

    async def passes(self, names: Sequence[str], count: int) -> dict[str, float]:
        """Median milliseconds of these methods, in alternating order."""
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(WARM_UP + count):
            self.weights.move()
            self.version += 1
            for name in names if number % 2 else reversed(names):
                start = time.perf_counter()
                await self.all()[name]()
                seconds[name].append(time.perf_counter() - start)
                self.weights.check(name)
        return {name: 1000 * statistics.median(values[WARM_UP:]) for name, values in seconds.items()}


def measure(megabytes: int, names: Sequence[str], count: int, store: ObjectStore | None = None) -> Result:
    """Medians of these ways, which take turns."""
    with tempfile.TemporaryDirectory(dir=FOLDER if FOLDER.is_dir() else None, prefix="tidemill-bench-") as folder:
        ways = Ways(Weights(megabytes), Path(folder), store)
        try:
            return Result(asyncio.run(ways.passes(names, count)), ways.stored)
        finally:
            ways.close()


def memory_rows(megabytes: int, here: Result) -> Iterator[Row]:
    """What needs no server."""
    for other in (COPY, COPY_EACH):
        yield row(f"{megabytes} MB: {MEMORY} / {other}", "ms", here.median[MEMORY], here.median[other])


def server_rows(megabytes: int, here: Result, there: Result) -> Iterator[Row]:
    """The other ways, and those of `here` beside them."""
    yield row(f"{megabytes} MB: {MEMORY} / {RAY}", "ms", here.median[MEMORY], there.median[RAY])
    for way in (DELTA, FULL):
        yield row(f"{megabytes} MB: {way} / {COPY}", "ms", there.median[way], here.median[COPY])
        yield row(f"{megabytes} MB: {way} / {RAY}", "ms", there.median[way], there.median[RAY])
    yield row(f"{megabytes} MB: stored, delta / full", "MB", *(there.stored[way] / 1e6 for way in (DELTA, FULL)))


@contextmanager
def servers(largest: int) -> Iterator[ObjectStore]:
    """Ray, with room for weights of so many megabytes, and an object store."""
    room = max(10**8, 3 * largest * 10**6)
    ray.init(num_cpus=2, object_store_memory=room, include_dashboard=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory() as folder, embedded_store(Path(folder)) as server:
            yield ObjectStore.connect(server.endpoint, "bench", server.access_key, server.secret_key)
    finally:
        ray.shutdown()


def row(name: str, unit: str, ours: float, other: float) -> Row:
    return Row(name, unit, round(ours, 3), round(other, 3), round(ours / other, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the transports of a weight sync.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="only shared_memory and the plain copy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would measure what else the machine does
    here = {
        # A few milliseconds scatter more than a second does.
        size: measure(size, (COPY, MEMORY, COPY_EACH), arguments.repeats * max(4, 1000 // size))
        for size in arguments.megabytes
    }
    rows = [line for size, result in here.items() for line in memory_rows(size, result)]
    if not arguments.memory:
        with servers(max(arguments.megabytes)) as store:
            for size, result in here.items():
                there = measure(size, (RAY, DELTA, FULL), arguments.repeats, store)
                rows += server_rows(size, result, there)
    print(f"{'ours / other':48}{'unit':>5}{'ours':>11}{'other':>11}{'ratio':>8}")
    for line in rows:
        print(f"{line.name:48}{line.unit:>5}{line.ours:11.2f}{line.other:11.2f}{line.ratio:8.2f}")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
