"""Groups for a queue, and what is measured while they pass. Standard library only: both interpreters import it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UID_BYTES = 8
Put = Callable[[bytes], Awaitable[object]]


@dataclass(frozen=True)
class Load:
    """What passes through a queue.

    Attributes:
        nbytes: size of a group.
        groups: how many.
        producers: that put at once; one consumer takes.
        capacity: of the queue, in groups.
    """

    nbytes: int
    groups: int
    producers: int
    capacity: int

    def payloads(self) -> list[bytes]:
        """Encoded groups as a queue sees them: their uid, then bytes without meaning."""
        rest = os.urandom(self.nbytes - UID_BYTES)
        return [uid.to_bytes(UID_BYTES, "little") + rest for uid in range(self.groups)]


@dataclass(frozen=True)
class Timing:
    """One pass: groups per second, and the latency of every put in milliseconds."""

    rate: float
    put_ms: list[float]


def uid_of(payload: bytes) -> int:
    return int.from_bytes(payload[:UID_BYTES], "little")


def read(payload: Any) -> int:
    """Touch every byte of a group that arrived, whatever holds it; its uid."""
    return uid_of(memoryview(payload).tobytes())


async def transfer(payloads: Sequence[bytes], producers: int, put: Put, take: Awaitable[list[int]]) -> Timing:
    """Send all groups until the consumer holds them all.

    Args:
        payloads: to send.
        producers: that share them.
        put: one group.
        take: so many groups; their uids.
    """
    latencies: list[float] = []

    async def produce(part: Sequence[bytes]) -> None:
        for payload in part:
            start = time.perf_counter()
            await put(payload)
            latencies.append(1000 * (time.perf_counter() - start))

    start = time.perf_counter()
    taken, *_ = await asyncio.gather(take, *(produce(payloads[n::producers]) for n in range(producers)))
    elapsed = time.perf_counter() - start
    if sorted(taken) != sorted(map(uid_of, payloads)):
        raise SystemExit(f"sent {len(payloads)} groups and received {len(taken)}, {len(set(taken))} different ones")
    return Timing(len(payloads) / elapsed, latencies)


def memory_bytes() -> int:
    """Memory of this process and all it started, shared pages counted once (proportional set size)."""
    total, pids = 0, [os.getpid()]
    while pids:
        process = Path("/proc") / str(pids.pop())
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
            children = [task.read_text().split() for task in process.glob("task/*/children")]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        pids += [int(pid) for child in children for pid in child]
    return total
