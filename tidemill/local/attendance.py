"""`tidemill train`: the training of one run in this process, watched as `tidemill run` watches a pipeline.

training (main thread, output to log.txt) ─► events.jsonl ─► progress on the screen (a thread)
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from tidemill.cluster.processes import adopt_orphans
from tidemill.config.run import RunConfig
from tidemill.local.interrupt import interruptible, undisturbed
from tidemill.local.launch import INTERRUPTED, clean_up
from tidemill.local.outcome import program, say, say_full, say_interrupted, say_started, show, shown
from tidemill.local.run_folder import begin, exclusive
from tidemill.observe.console import redirected, show_events
from tidemill.observe.events import past_events
from tidemill.observe.report import Summary
from tidemill.steps.preflight import (
    check_cluster,
    check_inputs,
    check_model,
    check_restart,
    check_room,
    check_tracking,
)

Train = Callable[[RunConfig], Summary]


def attend(config: RunConfig, train: Train, *, debug: bool) -> int:
    """Train, show how it goes, and leave what a run leaves in its folder; returns the exit status of the command.

    Args:
        config: of the run.
        train: `provider.train_here`.
        debug: whether the output of all processes goes to the screen instead of `log.txt`.

    Raises:
        TidemillError: the settings cannot work, another run holds the folder, or the training failed.
    """
    with exclusive(config.output, config.name):
        check_inputs(config)
        check_model(config)
        check_cluster(config)
        check_room(config, weights=0)
        check_tracking(config.tracking.uri)
        check_restart(config)
        settings, log = begin(config), config.folder / "log.txt"
        adopt_orphans()
        if debug:
            return watched(config, train, settings, Console())
        with redirected(log) as screen:
            return watched(config, train, settings, Console(file=screen))


def watched(config: RunConfig, train: Train, settings: Path, console: Console) -> int:
    """The training between its first and its last line on the screen; no process of it is left behind."""
    folder, again = shown(config.folder), f"{program()} train {shlex.quote(str(shown(settings)))}"
    say_started(config, console)
    try:
        with interruptible():
            try:
                summary = followed(config, train, console)
            finally:
                with undisturbed():
                    clean_up(config)
    except KeyboardInterrupt:
        say_interrupted(again, console)
        return INTERRUPTED
    except Exception:
        say(f"log: {folder / 'log.txt'}", console)
        say_full(config, again, console)
        raise
    show(config, summary, console)
    return 0


def followed(config: RunConfig, train: Train, console: Console) -> Summary:
    """Train in this thread, because signals come here, and show the events in another; writes `summary.json`."""
    events, stop = config.folder / "events.jsonl", threading.Event()
    earlier = sum(1 for _ in past_events(events))
    with ThreadPoolExecutor(1) as threads:
        shown_to_the_end = threads.submit(show_events, events, earlier, stop, console)
        try:
            summary = train(config)
        finally:
            stop.set()
            shown_to_the_end.result()
    summary.write(config.folder / "summary.json")
    return summary
