"""A trainer whose weights are fake, and engines that a synchronizer brings versions to without a fleet."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.protocols import Engine, PauseMode
from tidemill.records import EngineId, Float32Array, Int32Array
from tidemill.weights.synchronizer import Synchronizer


async def write(path: Path) -> int:
    return path.write_bytes(b"weights")


async def uniform(tokens: Int32Array) -> Float32Array:
    return np.full(len(tokens) - 1, -math.log(64), dtype=np.float32)


@dataclass
class FakeWeights:
    """A `WeightSource` on this host, whose log-probs are those of `FakeEngine`."""

    export: Callable[[Path], Awaitable[int]] = write
    score: Callable[[Int32Array], Awaitable[Float32Array]] = uniform


class SyncRig:
    """Keeps the membership as the fleet does: engines that are lost in a publication are left out."""

    def __init__(self, synchronizer: Synchronizer, *engines: Engine) -> None:
        self.synchronizer = synchronizer
        self.engines = {EngineId(number): engine for number, engine in enumerate(engines)}
        self.lost: dict[EngineId, str] = {}

    async def publish(
        self, version: int, mode: PauseMode, exported: Callable[[], None] = lambda: None
    ) -> Mapping[str, float]:
        adopted = await self.synchronizer.publish(self.engines.copy, version, mode, exported)
        self.lost = {engine_id: str(error) for engine_id, error in adopted.lost.items()}
        for engine_id in adopted.lost:
            del self.engines[engine_id]
        return adopted.metrics

    async def join(self, number: int, engine: Engine) -> None:
        async with self.synchronizer.joining(EngineId(number), engine):
            self.engines[EngineId(number)] = engine

    def close(self) -> None:
        self.synchronizer.close()
