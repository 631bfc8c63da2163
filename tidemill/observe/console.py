"""A run on a terminal or in a log: one line per phase and finished step, a progress bar, and redirected output."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from tidemill.observe.events import (
    EvaluationFinished,
    Event,
    Notice,
    PhaseFailed,
    PhaseStarted,
    StepFinished,
    follow,
    past_events,
)
from tidemill.observe.text import counted, duration, printable

HEADER = "     step  reward  held-out  age  queue  idle train/rollout   tokens/s      left"
LINES_PER_HEADER = 20
STEPS_AVERAGED = 10  # for the time left
BAR_TEXT = 40  # characters beside the bar, so that the bar fits into 80 columns


class Progress:
    """A context manager that shows events as they arrive.

    The held-out score of a training step is part of that step's line; any other score has its own line.
    """

    def __init__(self, console: Console) -> None:
        """The bar is shown on a terminal only; elsewhere only plain lines are written."""
        self.console = console
        # Other output of this process is shown above the bar, if it goes to the same terminal.
        same = console.file is sys.stdout
        self.bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            expand=True,
            redirect_stdout=same,
            redirect_stderr=same,
        )
        self.task: TaskID = self.bar.add_task("starting", total=None, left="")
        self.began: float | None = None
        self.lines = 0
        self.last: StepFinished | None = None
        self.pending: EvaluationFinished | None = None
        self.failed: PhaseFailed | None = None
        self.seconds: deque[float] = deque(maxlen=STEPS_AVERAGED)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()
        self.bar.remove_task(self.task)  # the last output is a line, not a bar
        self.bar.stop()

    def handle(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.step(event)
        elif isinstance(event, EvaluationFinished):
            self.evaluation(event)
        elif isinstance(event, PhaseStarted):
            self.phase(event)
        elif isinstance(event, Notice):
            self.line(Text(f"warning: {printable(event.text)}", style="yellow"))
        elif isinstance(event, PhaseFailed):
            self.failed = event

    def phase(self, event: PhaseStarted) -> None:
        """Show a phase with the time since the first event.

        A failure is shown once another phase follows, because that is a retry; the report shows the last failure.
        """
        self.flush()
        if self.failed is not None:
            failed, self.failed = self.failed, None
            text = f"{self.offset(failed.time):>9}  {failed.name} failed and is retried: {printable(failed.error)}"
            self.line(Text(text, style="yellow"))
        self.line(Text(f"{self.offset(event.time):>9}  {event.name}"))
        self.bar.update(self.task, description=short(event.name), left="")

    def step(self, event: StepFinished) -> None:
        """One line, with a header every 20 lines, and the bar."""
        if self.lines % LINES_PER_HEADER == 0:
            self.line(Text(HEADER, style="bold"))
        self.lines += 1
        self.seconds.append(event.seconds)
        left = duration((event.steps - event.step) * sum(self.seconds) / len(self.seconds))
        if self.pending is not None and self.pending.step != event.step:
            self.flush()
        held_out, self.pending, self.last = self.pending, None, event
        self.line(Text(step_line(event, held_out.score if held_out else None, left)))
        self.bar.update(self.task, description="training", completed=event.step, total=event.steps, left=f"{left} left")

    def evaluation(self, event: EvaluationFinished) -> None:
        """Keep the score for the line of the current step; without one, show it now."""
        self.offset(event.time)
        self.flush()
        self.pending = event
        if self.last is None or event.step <= self.last.step:
            self.flush()

    def flush(self) -> None:
        """Show a score that belongs to no step."""
        if self.pending is not None:
            score, self.pending = self.pending, None
            when = f"after step {score.step}" if score.step else "before training"
            text = f"held-out score {score.score:.3f} {when} ({counted(len(score.answers), 'prompt')})"
            self.line(Text(f"{self.offset(score.time):>9}  {text}", style="cyan"))

    def offset(self, time: float) -> str:
        """Time since the first event."""
        self.began = time if self.began is None else self.began
        return duration(time - self.began)

    def line(self, text: Text) -> None:
        """Write above the bar without wrapping, so that a log has one line per event."""
        self.console.print(text, soft_wrap=True)


@contextmanager
def showing_events(path: Path, console: Console, *, new_only: bool = True) -> Iterator[Future[None]]:
    """Within the body another thread shows the events of a log as they are written.

    Args:
        path: of the log.
        console: where to show them.
        new_only: whether to skip the events that the log has already.

    Yields:
        A future that is done within the body only if the thread failed; the end of the body raises its error.
    """
    earlier, stop = sum(1 for _ in past_events(path)) if new_only else 0, threading.Event()

    def show() -> None:
        with Progress(console) as progress:
            for event in islice(follow(path, stop), earlier, None):
                progress.handle(event)

    with ThreadPoolExecutor(1) as threads:
        shown = threads.submit(show)
        try:
            yield shown
        finally:
            stop.set()
            shown.result()


def step_line(event: StepFinished, held_out: float | None, left: str) -> str:
    """The 80 columns below `HEADER`; a missing metric is "-"."""
    metrics = event.metrics
    idle = f"{percent(metrics, 'idle/trainer')} / {percent(metrics, 'idle/rollouter')}"
    cells = (
        f"{event.step:>4}/{event.steps:<4}",
        f"{number(metrics, 'reward/mean', '.3f'):>6}",
        f"{'' if held_out is None else format(held_out, '.3f'):>8}",
        f"{number(metrics, 'staleness/max', '.0f'):>3}",
        f"{number(metrics, 'queue/depth', '.0f'):>5}",
        f"{idle:>18}",
        f"{number(metrics, 'throughput/tokens_per_second', ',.0f'):>9}",
        f"{left:>8}",
    )
    return "  ".join(cells)


def number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def percent(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.0%}" if name in metrics else "-"


def short(name: str) -> str:
    """The name of a phase, shortened for the bar."""
    return name if len(name) <= BAR_TEXT else f"{name[: BAR_TEXT - 3].rstrip()}..."


@contextmanager
def redirected(target: Path | str) -> Iterator[TextIO]:
    """Append standard output and error to a file, including libraries and child processes; yields the former output.

    After success, standard error stays redirected, because libraries write to it while the interpreter shuts down.
    """
    sys.stdout.flush()
    output, errors = os.dup(1), os.dup(2)
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        with os.fdopen(os.dup(output), "w", encoding=sys.stdout.encoding) as screen:
            yield screen
    except BaseException:
        os.dup2(errors, 2)
        raise
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        for descriptor in (output, errors, file):
            os.close(descriptor)
