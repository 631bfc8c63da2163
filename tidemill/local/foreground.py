"""`tidemill train`: the training of one run in this process, without the pipeline.

training (main thread, output to log.txt) ─► events.jsonl ─► progress on the screen (another thread)
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tidemill.cluster.processes import adopt_orphans, interruptible, signals_ignored
from tidemill.config.run import RunConfig
from tidemill.local.launch import INTERRUPTED, clean_up
from tidemill.local.messages import (
    print_full_disk,
    print_interrupted,
    print_line,
    print_report,
    print_started,
    program,
    shown,
)
from tidemill.observe.console import redirected, showing_events
from tidemill.observe.events import EventLog, PhaseStarted, past_events, step_seconds
from tidemill.observe.report import Summary
from tidemill.steps.provider import LocalProvider
from tidemill.steps.run_folder import output_lock, prepare_folder
from tidemill.steps.validate import check_inputs, check_model, check_restart, check_tracking

Train = Callable[[RunConfig], Summary]


def train_in_foreground(config: RunConfig, train: Train, *, debug: bool) -> int:
    """Train, show the progress, and write what a run writes to its folder; returns the exit status of the command.

    Args:
        config: of the run.
        train: `provider.train_here`.
        debug: whether the output of all processes goes to the screen instead of `log.txt`.

    Raises:
        TidemillError: the settings cannot succeed, another run holds the folder, or the training failed.
    """
    with output_lock(config.output, config.name):
        inputs = check_inputs(config)
        LocalProvider(config).check()
        check_tracking(config.tracking.uri)
        check_restart(config)
        check_model(config, inputs, trains=True)
        settings = prepare_folder(config)
        adopt_orphans()
        if debug:
            return train_and_clean_up(config, train, settings, Console())
        with redirected(config.folder / "log.txt") as screen:
            return train_and_clean_up(config, train, settings, Console(file=screen))


def train_and_clean_up(config: RunConfig, train: Train, settings: Path, console: Console) -> int:
    """Train, end every process of the training, and report; returns the exit status of the command."""
    resume = f"{program()} train {shlex.quote(str(shown(settings)))}"
    print_started(config, console)
    try:
        with interruptible():
            try:
                # The training runs in the main thread, which gets the signals.
                with showing_events(config.folder / "events.jsonl", console):
                    summary = timed(config, train)
                summary.write(config.folder / "summary.json")
            finally:
                with signals_ignored():
                    clean_up(config)
    except KeyboardInterrupt:
        print_interrupted(resume, console)
        return INTERRUPTED
    except Exception:
        print_line(f"log: {shown(config.folder / 'log.txt')}", console)
        print_full_disk(config, resume, console)
        raise
    print_report(config, summary, console)
    return 0


def timed(config: RunConfig, train: Train) -> Summary:
    """Train; the summary has the time of all attempts."""
    path = config.folder / "events.jsonl"
    with EventLog(path) as events:
        events.write(PhaseStarted("train"))
    summary = train(config)
    launches = step_seconds(past_events(path), time.time())
    return replace(summary, total_seconds=sum(sum(launch.values()) for launch in launches))
