"""From a new version at the trainer to the same bytes in the engine's parameters, by every transport.

    python benchmarks/sync.py [--megabytes 10 100 500] [--repeats 5] [--json PATH]

Beside it, in the same run: a plain copy in memory, and `torch.save` + `ray.put` + `ray.get` + `torch.load`. Every way
begins with bfloat16 tensors and ends with the same loop that copies each into a parameter, all in one process. What
vLLM does to load comes on top, and is the same for every way; so does the cast of the trainer's float32 weights.

Between two publications every weight moves by a learning rate of 1e-6 in float32, so that a delta is what it would be
in a run. The object store is the embedded server, its data on disk. Rows: name, unit, ours, other, ratio (ours over
other), medians of the passes, which alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray
import torch
from results.row import Row, write_rows

from tidemill.protocols import WeightUpdate
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store
from tidemill.sync.mapped_weights import MappedWeights
from tidemill.sync.outbox import MemoryOutbox
from tidemill.sync.publisher import WeightPublisher
from tidemill.sync.receiver import Receiver

MEMORY = Path("/dev/shm")
SIDE = 1024  # a tensor has this many rows and columns: 2 MiB
LEARNING_RATE = 1e-6
COPY, RAY = "plain copy", "torch.save + ray"
OURS = ("shared_memory", "object_store, delta", "object_store, full")
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
        """The engine's end of every way."""
        self.parameters[name].copy_(tensor)

    def check(self, way: str) -> None:
        """A way that loses a bit is no way."""
        for name, tensor in self.weights.items():
            if not torch.equal(tensor.view(torch.int16), self.parameters[name].view(torch.int16)):
                raise SystemExit(f"{way} changed {name}")


@dataclass
class Ways:
    """Every way from the trainer's weights to the engine's parameters."""

    weights: Weights
    store: ObjectStore
    folder: Path

    def __post_init__(self) -> None:
        self.version, self.loop = 0, asyncio.new_event_loop()
        # As in a run, where a process exports to one folder and reads from one.
        self.exports, self.adopted = defaultdict(MappedWeights), defaultdict(MappedWeights)
        self.outdated: WeightUpdate | None = None
        self.outbox = MemoryOutbox(self.folder / "outbox", self.export)
        self.publishers = {way: WeightPublisher(f"runs/{n}", n) for way, n in ((OURS[1], 1 << 30), (OURS[2], 1))}
        self.receivers = {way: Receiver(self.folder / f"{n}", self.opened, 60) for n, way in enumerate(self.publishers)}
        self.stored: dict[str, float] = {}

    @contextmanager
    def opened(self) -> Iterator[ObjectStore]:
        """The store is up for the whole run."""
        yield self.store

    async def export(self, path: Path) -> int:
        """As the trainer does."""
        return self.exports[path.parent].write(path, self.weights.weights, torch.bfloat16)

    def all(self) -> dict[str, Callable[[], None]]:
        """By name, those to compare with first."""
        return {
            COPY: self.copy,
            RAY: self.ray,
            OURS[0]: lambda: self.loop.run_until_complete(self.shared_memory()),
            OURS[1]: lambda: self.loop.run_until_complete(self.object_store(OURS[1])),
            OURS[2]: lambda: self.loop.run_until_complete(self.object_store(OURS[2])),
        }

    def copy(self) -> None:
        """Into a buffer that is there already, and from it."""
        for name, tensor in self.weights.weights.items():
            self.weights.load(name, self.weights.staging[name].copy_(tensor))

    def ray(self) -> None:
        """Through Ray's object store; unpickling is restricted to tensors."""
        buffer = io.BytesIO()
        torch.save(self.weights.weights, buffer)
        received = ray.get(ray.put(buffer.getvalue()))
        for name, tensor in torch.load(io.BytesIO(received), weights_only=True).items():
            self.weights.load(name, tensor)

    async def shared_memory(self) -> None:
        """One of two files in memory, which stay mapped on both sides."""
        self.version += 1
        update = (await self.outbox.write(self.version)).update
        self.adopt(update)
        if self.outdated:
            self.outbox.retire(self.outdated)
        self.outdated = update

    async def object_store(self, way: str) -> None:
        """Through S3, from an export to a fetched file."""
        path = self.folder / "export.safetensors"
        await self.export(path)
        publication = self.publishers[way].publish(self.store, self.version, path)
        async with self.receivers[way].local(publication.update) as local:
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
        for receiver in self.receivers.values():
            receiver.close()
        self.outbox.close()
        self.loop.close()


def measure(megabytes: int, repeats: int, store: ObjectStore) -> list[Row]:
    """Seconds of every way, alternating. The first two passes warm up.

    They make the files that later ones use again, and in the first the delta has no base yet.
    """
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="tidemill-bench-") as folder:
        ways = Ways(Weights(megabytes), store, Path(folder))
        for number in range(repeats + 2):
            ways.weights.move()
            for way, run in ways.all().items():
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                ways.weights.check(way)
                if number > 1:
                    seconds.setdefault(way, []).append(1000 * elapsed)
        ways.close()
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    rows = [row(f"{megabytes} MB: {way} / {o}", "ms", medians[way], medians[o]) for way in OURS for o in (COPY, RAY)]
    return [*rows, row(f"{megabytes} MB: stored, delta / full", "MB", *(ways.stored[way] / 1e6 for way in OURS[1:]))]


def row(name: str, unit: str, ours: float, other: float) -> Row:
    return Row(name, unit, round(ours, 3), round(other, 3), round(ours / other, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the transports of a weight sync.")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other would measure what else the machine does
    largest = max(arguments.megabytes) * 10**6
    ray.init(num_cpus=2, object_store_memory=max(10**8, 3 * largest), include_dashboard=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory() as folder, embedded_store(Path(folder)) as server:
            store = ObjectStore.connect(server.endpoint, "bench", server.access_key, server.secret_key)
            rows = [row for size in arguments.megabytes for row in measure(size, arguments.repeats, store)]
    finally:
        ray.shutdown()
    print(f"{'ours / other':48}{'unit':>5}{'ours':>11}{'other':>11}{'ratio':>8}")
    for line in rows:
        print(f"{line.name:48}{line.unit:>5}{line.ours:11.2f}{line.other:11.2f}{line.ratio:8.2f}")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
