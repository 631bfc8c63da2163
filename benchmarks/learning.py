"""How well and how fast the demo learns, seed by seed: the whole pipeline, run after run.

The demo must reach a held-out score of 0.70 within 25 steps and 360 seconds of training on two cores. Each row is one
seed; `ratio` is the score over 0.70, or 360 over the seconds.

    python benchmarks/learning.py [--seeds 5] [--config examples/addition.yaml] [--json rows.json]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from results.row import Row, write_rows
from rich.console import Console
from rich.table import Table

from tidemill.observe.report import Summary

SCORE, SECONDS = 0.70, 360.0
DEADLINE_S = 3600


def run_seed(config: str, seed: int, output: Path, overrides: Sequence[str]) -> Summary:
    """One whole run; its output goes to the terminal."""
    tidemill = Path(sys.executable).with_name("tidemill")
    before = set(output.glob("*/summary.json"))
    command = [str(tidemill), "run", config, f"seed={seed}", f"output={output}", *overrides]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    (written,) = set(output.glob("*/summary.json")) - before
    return Summary.read(written)


def rows(seed: int, summary: Summary) -> Iterator[Row]:
    """Score and training time, compared with their limits."""
    score = summary.held_out_after or 0.0
    yield Row(f"held-out score, seed {seed}", "fraction", score, SCORE, score / SCORE)
    yield Row(f"training, seed {seed}", "s", summary.train_seconds, SECONDS, SECONDS / summary.train_seconds)


def show(summaries: dict[int, Summary]) -> None:
    """One line per seed."""
    table = Table("seed", "steps", "before", "after", "train s", "total s", "tokens/s", "max age", "idle t/r", "GiB")
    for seed, s in summaries.items():
        idle = f"{s.trainer_idle or 0:.0%} / {s.rollouter_idle or 0:.0%}"
        memory = f"{(s.peak_memory_bytes or 0) / 2**30:.1f}"
        scores = [f"{score:.2f}" if score is not None else "-" for score in (s.held_out_before, s.held_out_after)]
        times = [f"{s.train_seconds:.0f}", f"{s.total_seconds:.0f}", f"{s.tokens_per_second:.0f}"]
        table.add_row(str(seed), str(s.steps), *scores, *times, str(s.max_age), idle, memory)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--config", default="examples/addition.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    summaries: dict[int, Summary] = {}
    for seed in range(arguments.seeds):
        summaries[seed] = run_seed(arguments.config, seed, arguments.output, arguments.overrides)
        show(summaries)
        if arguments.json:  # after every seed, so that a failed run loses no rows
            write_rows(arguments.json, [row for seed, summary in summaries.items() for row in rows(seed, summary)])


if __name__ == "__main__":
    main()
