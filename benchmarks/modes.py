"""The demo in each of the four modes: throughput, idle time, ages, partial rollouts, drops, score and a timeline.

Modes differ only in settings of `asynchrony`. All modes train the same number of groups from the same prompts.
`overlap` is the share of the trainer's updates during which engines generate. One row per mode, compared with
on-policy.

    python benchmarks/modes.py [MODE ...] [--steps 16] [--output runs/modes] [--images FOLDER] [--json rows.json]

Without MODE, all modes run one after the other. The table shows every mode with a finished run in the folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from results.row import Row, write_rows

from tidemill.observe.charts import timeline_svg
from tidemill.observe.events import StepFinished, read_events
from tidemill.observe.report import Summary
from tidemill.observe.timeline import newest_attempt, overlap

MODES: Mapping[str, Sequence[str]] = {
    "on-policy": ["asynchrony.max_staleness=0"],
    "streaming": ["asynchrony.max_staleness=0", "asynchrony.trigger_parameter_sync_step=4"],
    "stale": ["asynchrony.max_staleness=1", "asynchrony.partial_rollout=false"],
    "partial": ["asynchrony.max_staleness=1", "asynchrony.partial_rollout=true"],
}
DEADLINE_S = 3600
HEAD = (
    "| mode | steps, versions | train s | trained tokens/s | idle trainer, engines | overlap | age mean, max "
    "| stale groups | partial, span | wasted tokens | dropped | held-out |"
)


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    mode: str
    folder: Path
    summary: Summary
    overlap: float
    versions: int

    @classmethod
    def newest(cls, mode: str, output: Path) -> Finished | None:
        """The newest finished run of a mode, or None."""
        done = sorted(output.glob(f"{mode}-*/summary.json"), key=lambda path: path.stat().st_mtime)
        if not done:
            return None
        events = read_events(done[-1].with_name("events.jsonl"))
        versions = max(event.version for event in events if isinstance(event, StepFinished))
        return cls(mode, done[-1].parent, Summary.read(done[-1]), overlap(newest_attempt(events)), versions)

    def line(self) -> str:
        """A row of the table, as Markdown."""
        s = self.summary
        cells = [
            self.mode,
            f"{s.steps}, {self.versions}",
            f"{s.train_seconds:.0f}",
            f"{s.tokens_per_second:.0f}",
            f"{s.trainer_idle or 0:.0%}, {s.rollouter_idle or 0:.0%}",
            f"{self.overlap:.0%}",
            f"{s.metrics['staleness/mean']:.2f}, {s.max_age}",
            f"{s.metrics['staleness/stale_groups']:.0f} of {s.metrics['groups/count']:.0f}",
            f"{s.metrics['staleness/partial_ratio']:.1%}, {s.metrics['staleness/partial_span_max']:.0f}",
            f"{s.metrics.get('rollout/wasted_tokens', 0):.0f}",
            ", ".join(f"{count} {reason}" for reason, count in s.dropped.items()) or "0",
            " to ".join("-" if score is None else f"{score:.2f}" for score in (s.held_out_before, s.held_out_after)),
        ]
        return f"| {' | '.join(cells)} |"


def run(mode: str, config: str, steps: int, output: Path, overrides: Sequence[str]) -> None:
    """One whole run; its output goes to the terminal."""
    tidemill = Path(sys.executable).with_name("tidemill")
    settings = [f"name={mode}", f"output={output}", f"trainer.steps={steps}", "evaluation.every=0", *MODES[mode]]
    subprocess.run([str(tidemill), "run", config, *settings, *overrides], check=True, timeout=DEADLINE_S)


def rows(finished: Sequence[Finished]) -> Iterator[Row]:
    """Throughput of each mode, compared with on-policy."""
    by_mode = {one.mode: one.summary.tokens_per_second for one in finished}
    if "on-policy" in by_mode:
        base = by_mode["on-policy"]
        for mode, speed in by_mode.items():
            yield Row(f"trained tokens/s, {mode}", "tokens/s", speed, base, speed / base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="a setting of all modes")
    parser.add_argument("--steps", type=int, default=16, help="a multiple of 4 (default: 16)")
    parser.add_argument("--config", default="examples/addition.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/modes"))
    parser.add_argument("--images", type=Path, help="folder for the timelines")
    parser.add_argument("--table", action="store_true", help="run nothing, show the finished runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.images is not None:
        arguments.images.mkdir(parents=True, exist_ok=True)
    for mode in () if arguments.table else arguments.modes or MODES:
        run(mode, arguments.config, arguments.steps, arguments.output, arguments.set)
    finished = [done for mode in MODES if (done := Finished.newest(mode, arguments.output)) is not None]
    print(HEAD, "|" + "---|" * (HEAD.count("|") - 1), *(one.line() for one in finished), sep="\n")
    for one in finished if arguments.images else ():
        picture = timeline_svg(newest_attempt(read_events(one.folder / "events.jsonl")))
        (arguments.images / f"timeline_{one.mode}.svg").write_text(picture, encoding="utf-8")
    if arguments.json:
        write_rows(arguments.json, list(rows(finished)))


if __name__ == "__main__":
    main()
