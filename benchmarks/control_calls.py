"""The time in which an engine's process answers control calls while thousands of generations are open.

The actor is the real one, in a process of its own. Its engine is the stand-in, whose generations stay at their first
token until the next weight update, so vLLM is not measured. Each row compares with the same call of an idle engine.

    python benchmarks/control_calls.py [--open 3000] [--repeats 5] [--json rows.json]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import ray
from results.row import Row, write_rows

from tidemill.actors.engine import EngineActor, RemoteEngine, engine_shell
from tidemill.actors.placement import Placement
from tidemill.fakes import FakeEngine, Fault
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import EngineId

PROMPT, SAMPLING = np.arange(3, dtype=np.int32), Sampling(n=1, max_tokens=3, temperature=1.0)
MODES: tuple[PauseMode, ...] = ("keep", "abort")  # `wait` takes as long as the generations
CALLS = 20
DEADLINE_S = 120.0


class CrowdedActor(EngineActor):
    """An engine's actor without a model."""

    def __init__(self, crowd: int) -> None:
        self.downloader = None
        self.engine = FakeEngine(lengths=(3, 3), faults={uid: Fault("straggle", times=1) for uid in range(crowd)})


async def milliseconds(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - start)


async def measure(crowd: int, mode: PauseMode) -> tuple[float, float]:
    """The slowest of some calls of `version`, and a weight update, while `crowd` generations are open."""
    engine = RemoteEngine(EngineId(0), engine_shell(CrowdedActor, Placement(), {}).remote(crowd))
    generations = [asyncio.create_task(engine.generate(f"{uid}.0", PROMPT, SAMPLING)) for uid in range(crowd)]
    async with asyncio.timeout(DEADLINE_S):
        while (await engine.stats())["running"] < crowd:
            await asyncio.sleep(0.05)
    asked = max([await milliseconds(engine.version) for _ in range(CALLS)])
    updated = await milliseconds(lambda: engine.update_weights(WeightUpdate(1, "", 0), mode))
    async with asyncio.timeout(DEADLINE_S):
        groups = await asyncio.gather(*generations)
    if any(group[0].versions[-1].version != 1 for group in groups):
        raise SystemExit("a generation ended before the new weights came")
    engine.kill()
    return asked, updated


def rows(crowd: int, repeats: int) -> Iterator[Row]:
    """Medians of alternating passes."""
    for mode in MODES:
        full, empty = [], []
        for _ in range(repeats):
            full.append(asyncio.run(measure(crowd, mode)))
            empty.append(asyncio.run(measure(0, mode)))
        for place, what in enumerate((f"version, slowest of {CALLS}", "update_weights")):
            ours, other = (statistics.median(times[place] for times in side) for side in (full, empty))
            name = f"{crowd} open, {mode}: {what} / idle engine"
            yield Row(name, "ms", round(ours, 2), round(other, 2), round(ours / other, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=int, default=3000, help="generations")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        table = list(rows(args.open, args.repeats))
    finally:
        ray.shutdown()
    print(f"{'':60} {'unit':>5} {'crowd':>8} {'idle':>8} {'ratio':>7}")
    for line in table:
        print(f"{line.name:60} {line.unit:>5} {line.ours:>8.2f} {line.other:>8.2f} {line.ratio:>7.2f}")
    if args.json:
        write_rows(args.json, table)


if __name__ == "__main__":
    main()
