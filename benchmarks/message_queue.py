"""Throughput, latency, memory and losses of the message queue, beside the `MessageQueue` actor of verl.

Both pass the same bytes from several producers to one consumer: as many groups as the queue holds, so that no
producer waits for room. A producer puts one group and waits until the queue has it, as the rollouter does. The
consumer reads every byte. Ours leases the groups of an optimizer step at once, as the trainer does, and acknowledges
them; verl's client makes one call a group at either end. Its rollouter's other calls to the queue are left out. verl
runs in its own environment (`make bench-peers`) and its own Ray; the passes of the two alternate.

Encoding is measured separately: a group as one safetensors blob, beside cloudpickle of the same group, as verl packs
its samples.

    python benchmarks/message_queue.py [--sizes 1000 265000] [--producers 1 16] [--repeats 3] [--json rows.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from results.row import Row, write_rows
from transfer.load import Load, Timing, memory_bytes, read, transfer, uid_of

from tidemill.actors.queue import RemoteQueue, start_queue
from tidemill.protocols import Delivery
from tidemill.records import Group, GroupHeader, Prompt, Rollout, VersionSpan

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
BATCH = 32
DEADLINE_S = 120.0
FULL_DEADLINE_S = 1.0
BYTES_IN_A_PASS = 160e6


@dataclass(frozen=True)
class Verl:
    """The process with verl's queue."""

    process: subprocess.Popen[str]

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process with verl ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def request(self, method: str, load: Load) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"method": method, **asdict(load)}) + "\n")
        self.process.stdin.flush()
        return self.answer()


@contextmanager
def start_verl(python: Path) -> Iterator[Verl]:
    if not python.exists():
        raise SystemExit(f"{python} does not exist: run `make bench-peers`, or name another interpreter with --peers")
    command = [str(python), "-m", "transfer.verl"]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Verl(process)
        process.stdin.close()  # the process then ends


async def put(queue: RemoteQueue, payload: bytes, timeout_s: float = DEADLINE_S) -> None:
    header = GroupHeader(uid_of(payload), 0, 0, 1, len(payload))
    await queue.put([Delivery(header, payload)], timeout_s)


async def take(queue: RemoteQueue, count: int) -> list[int]:
    uids: list[int] = []
    while len(uids) < count:
        lease = await queue.lease(min(BATCH, count - len(uids)), 0, DEADLINE_S)
        uids += [read(delivery.payload) for delivery in lease.deliveries]
        await queue.acknowledge(lease.lease_id)
    return uids


async def start(load: Load) -> RemoteQueue:
    queue = start_queue(load.capacity, 1, "block")
    await queue.stats()  # waits until it has started
    return queue


async def pass_ours(load: Load) -> Timing:
    queue = await start(load)
    return await transfer(load.payloads(), load.producers, lambda p: put(queue, p), take(queue, load.groups))


async def fill_ours(load: Load) -> dict[str, int]:
    """Fill the queue without a consumer: groups kept, groups refused, and the memory that they hold."""
    queue = await start(load)
    payloads, before = load.payloads(), memory_bytes()
    puts = (put(queue, payload, FULL_DEADLINE_S) for payload in payloads)
    results = await asyncio.gather(*puts, return_exceptions=True)
    held = memory_bytes() - before
    errors = [result for result in results if result is not None]
    if unexpected := [error for error in errors if not isinstance(error, TimeoutError)]:
        raise unexpected[0]
    return {"kept": int((await queue.stats())["depth"]), "refused": len(errors), "held": held}


def row(name: str, unit: str, ours: float, other: float) -> Row:
    return Row(name, unit, round(ours, 3), round(other, 3), round(ours / other, 3) if other else None)


def size_name(nbytes: int) -> str:
    return f"{nbytes / 1e6:g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:g} kB"


def passes(verl: Verl, nbytes: int, producers: int, repeats: int) -> list[Row]:
    """Alternate passes, and compare their medians; percentiles are of one pass."""
    groups = int(min(512, max(48, BYTES_IN_A_PASS / nbytes)))
    load = Load(nbytes, groups, producers, capacity=groups)
    ours, other = [], []
    for _ in range(repeats):
        ours.append(asyncio.run(pass_ours(load)))
        other.append(Timing(**verl.request("transfer", load)))

    def median(timings: list[Timing], value: Callable[[Timing], float]) -> float:
        return statistics.median(map(value, timings))

    label = f"{size_name(nbytes)}, {producers} producer{'s' if producers > 1 else ''}"
    rows = [row(f"{label}: groups passed", "1/s", *(median(side, lambda t: t.rate) for side in (ours, other)))]
    for percent in (50, 99):
        values = (median(side, lambda t, p=percent: float(np.percentile(t.put_ms, p))) for side in (ours, other))
        rows.append(row(f"{label}: put p{percent}", "ms", *values))
    return rows


def full(verl: Verl) -> Iterator[Row]:
    """Memory of a full queue, and losses of an overfull one."""
    load = Load(nbytes=265_000, groups=256, producers=256, capacity=256)
    ours, other = asyncio.run(fill_ours(load)), verl.request("fill", load)
    payload = load.groups * load.nbytes
    yield row("memory of 256 queued groups of 265 kB", "of payload", ours["held"] / payload, other["held"] / payload)
    crowd = Load(nbytes=1000, groups=80, producers=80, capacity=64)
    sides = (asyncio.run(fill_ours(crowd)), verl.request("fill", crowd))
    lost = (crowd.groups - side["kept"] - side["refused"] for side in sides)
    yield row("80 groups into a queue of 64: lost", "groups", *lost)


def make_group(response_tokens: int = 2048, n: int = 8, prompt_tokens: int = 256) -> Group:
    """Random tokens and log-probs."""
    random = np.random.default_rng(0)
    rollouts = tuple(
        Rollout(
            token_ids=random.integers(0, 50_000, response_tokens, dtype=np.int32),
            log_probs=-random.random(response_tokens, dtype=np.float32),
            loss_mask=np.ones(response_tokens, np.float32),
            versions=(VersionSpan(0, 0, response_tokens),),
            finish_reason="stop",
            text="word " * response_tokens,
            reward=1.0,
            reward_parts={"exact_number": 1.0},
            seconds=1.0,
        )
        for _ in range(n)
    )
    return Group(Prompt(0, 0, random.integers(0, 50_000, prompt_tokens, dtype=np.int32), "question"), rollouts)


def encoding(repeats: int = 100) -> Iterator[Row]:
    group = make_group()
    blob, pickled = group.to_bytes(), cloudpickle.dumps(group)
    yield row("encoded group of 8 x 2048 tokens", "bytes", len(blob), len(pickled))
    yield row(
        "encode it",
        "ms",
        milliseconds(group.to_bytes, repeats),
        milliseconds(lambda: cloudpickle.dumps(group), repeats),
    )
    decode = (lambda: Group.from_bytes(blob), lambda: cloudpickle.loads(pickled))
    yield row("decode it", "ms", *(milliseconds(call, repeats) for call in decode))


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def show(rows: list[Row]) -> None:
    print(f"{'':44} {'unit':>10} {'ours':>11} {'verl':>11} {'ratio':>7}")
    for line in rows:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        print(f"{line.name:44} {line.unit:>10} {line.ours:>11.2f} {line.other:>11.2f} {ratio:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1_000, 32_000, 265_000, 4_000_000], help="bytes")
    parser.add_argument("--producers", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PEERS, help="interpreter that has verl")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with start_verl(args.peers) as verl:
        versions = verl.answer()
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            rows = list(full(verl))  # first, while the object stores have touched no memory
            passes(verl, 1000, 1, 1)  # warm-up
            rows += [
                r for size in args.sizes for count in args.producers for r in passes(verl, size, count, args.repeats)
            ]
        finally:
            ray.shutdown()
    rows += encoding()
    print(f"verl {versions['verl']}, ray {versions['ray']} and {ray.__version__}, Python {platform.python_version()}")
    show(rows)
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
