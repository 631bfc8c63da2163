"""Throughput and tail latency of the message queue, beside Ray's own `ray.util.queue.Queue`.

Both carry the same groups (8 rollouts of 512 tokens, prompt of 256) between the same producers and one consumer, and
both end with decoded groups. Ours: one safetensors blob a group in the object store, leased in batches, acknowledged.
Other: one cloudpickled group a call, as verl's MessageQueue has it; verl itself is not installed, so this is its way of
passing groups over Ray's queue, not a measurement of verl. Ray sends small arguments inside the call, which is faster
than the object store; for groups of half a megabyte (`--tokens 4096`) references win.

    python benchmarks/message_queue.py [--groups 192] [--tokens 512] [--repeats 3] [--json rows.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.util.queue import Full, Queue

from tidemill.actors.queue import RemoteQueue, start_queue
from tidemill.protocols import Delivery
from tidemill.records import Group, Prompt, Rollout, VersionSpan

CAPACITY = 64
BATCH = 16
DEADLINE_S = 120.0
FULL_DEADLINE_S = 1.0
Put = Callable[[Group], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """One line of the result; ratio is ours over other, None where other is 0."""

    name: str
    unit: str
    ours: float
    other: float
    ratio: float | None


@dataclass(frozen=True)
class Timing:
    """One pass: groups per second, and the latency of every put in milliseconds."""

    rate: float
    put_ms: list[float]


def make_group(uid: int, response_tokens: int, n: int = 8, prompt_tokens: int = 256) -> Group:
    """A group as large as a real one."""
    random = np.random.default_rng(uid)
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
    return Group(Prompt(uid, uid, random.integers(0, 50_000, prompt_tokens, dtype=np.int32), "question"), rollouts)


async def put_ours(queue: RemoteQueue, group: Group, timeout_s: float = DEADLINE_S) -> None:
    blob = group.to_bytes()
    await queue.put([Delivery(group.header(len(blob)), ray.put(blob))], timeout_s)


async def take_ours(queue: RemoteQueue, count: int) -> list[int]:
    uids: list[int] = []
    while len(uids) < count:
        lease = await queue.lease(min(BATCH, count - len(uids)), 0, DEADLINE_S)
        blobs = await asyncio.gather(*(delivery.payload for delivery in lease.deliveries))
        uids += [Group.from_bytes(blob).uid for blob in blobs]
        await queue.acknowledge(lease.lease_id)
    return uids


async def put_other(queue: Queue, group: Group, timeout_s: float = DEADLINE_S) -> None:
    await queue.put_async(cloudpickle.dumps(group), timeout=timeout_s)


async def take_other(queue: Queue, count: int) -> list[int]:
    return [cloudpickle.loads(await queue.get_async(timeout=DEADLINE_S)).uid for _ in range(count)]


async def transfer(groups: list[Group], producers: int, put: Put, take: Awaitable[list[int]]) -> Timing:
    """Send all groups with so many producers, until the consumer holds them all."""
    latencies: list[float] = []

    async def produce(part: list[Group]) -> None:
        for group in part:
            start = time.perf_counter()
            await put(group)
            latencies.append(1000 * (time.perf_counter() - start))

    start = time.perf_counter()
    taken, *_ = await asyncio.gather(take, *(produce(groups[index::producers]) for index in range(producers)))
    elapsed = time.perf_counter() - start
    if sorted(taken) != [group.uid for group in groups]:
        raise SystemExit(f"sent {len(groups)} groups and received {len(taken)}")
    return Timing(len(groups) / elapsed, latencies)


async def transfer_ours(groups: list[Group], producers: int) -> Timing:
    queue = start_queue(CAPACITY, 1, "block")
    await queue.stats()  # the actor is up
    return await transfer(groups, producers, lambda group: put_ours(queue, group), take_ours(queue, len(groups)))


async def transfer_other(groups: list[Group], producers: int) -> Timing:
    queue = Queue(CAPACITY, actor_options={"num_cpus": 0})
    queue.qsize()
    timing = await transfer(groups, producers, lambda group: put_other(queue, group), take_other(queue, len(groups)))
    queue.shutdown(force=True)
    return timing


async def lost_ours(groups: list[Group]) -> int:
    """Groups lost without an error when 16 producers overfill a queue that nobody reads, and then it ends."""
    queue = start_queue(CAPACITY, 1, "block")
    refused = await refusals(groups, lambda group: put_ours(queue, group, FULL_DEADLINE_S), TimeoutError)
    await queue.close()
    kept = 0
    while not (lease := await queue.lease(BATCH, 0, DEADLINE_S)).ended or lease.deliveries:
        kept += len(lease.deliveries)
    return len(groups) - refused - kept


async def lost_other(groups: list[Group]) -> int:
    queue = Queue(CAPACITY, actor_options={"num_cpus": 0})
    refused = await refusals(groups, lambda group: put_other(queue, group, FULL_DEADLINE_S), Full)
    kept = queue.qsize()
    queue.shutdown(force=True)
    return len(groups) - refused - int(kept)


async def refusals(groups: list[Group], put: Put, error: type[Exception]) -> int:
    """How many puts failed visibly."""
    results = await asyncio.gather(*(put(group) for group in groups), return_exceptions=True)
    for result in results:
        if result is not None and not isinstance(result, error):
            raise result
    return sum(result is not None for result in results)


def compare(name: str, unit: str, ours: float, other: float) -> Row:
    return Row(name, unit, round(ours, 3), round(other, 3), round(ours / other, 3) if other else None)


def measure(groups: list[Group], producers: int, repeats: int) -> list[Row]:
    """Alternate the two, and compare medians of the passes."""
    ours, other = [], []
    for _ in range(repeats):
        ours.append(asyncio.run(transfer_ours(groups, producers)))
        other.append(asyncio.run(transfer_other(groups, producers)))
    label = f"{producers} producer{'s' if producers > 1 else ''}"

    def median(timings: list[Timing], value: Callable[[Timing], float]) -> float:
        return statistics.median(map(value, timings))

    rows = [compare(f"{label}: groups passed", "1/s", median(ours, lambda t: t.rate), median(other, lambda t: t.rate))]
    for percentile in (50, 99):
        values = [median(side, lambda t, p=percentile: float(np.percentile(t.put_ms, p))) for side in (ours, other)]
        rows.append(compare(f"{label}: put p{percentile}", "ms", *values))
    return rows


def show(rows: list[Row], nbytes: int, pickled: int) -> None:
    print(f"group: {nbytes} bytes as safetensors, {pickled} bytes cloudpickled; queue of {CAPACITY}")
    print(f"{'':34} {'unit':>6} {'ours':>10} {'other':>10} {'ratio':>7}")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        print(f"{row.name:34} {row.unit:>6} {row.ours:>10.2f} {row.other:>10.2f} {ratio:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the message queue beside ray.util.queue.Queue.")
    parser.add_argument("--groups", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=512, help="response tokens of each of a group's 8 rollouts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments: Any = parser.parse_args()
    groups = [make_group(uid, arguments.tokens) for uid in range(arguments.groups)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        measure(groups[:8], 1, 1)  # warm-up
        rows = [row for producers in (1, 16) for row in measure(groups, producers, arguments.repeats)]
        crowd = groups[: CAPACITY + BATCH]
        rows.append(
            compare(
                "lost silently when overfull", "groups", asyncio.run(lost_ours(crowd)), asyncio.run(lost_other(crowd))
            )
        )
    finally:
        ray.shutdown()
    show(rows, len(groups[0].to_bytes()), len(cloudpickle.dumps(groups[0])))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
