"""The processes of a run: the signals that stop it, the lock that they hold, and how all of them end.

The KFP local runner, Ray and vLLM start processes, some in other sessions, and the KFP local runner does not pass a
signal to its step. So the launcher becomes the reaper of its descendants: a process that loses its parent becomes its
child, and a walk over the children of the launcher finds every process of the run and no other.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from tidemill.errors import RunError

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of Python processes that must not look for Python's own modules in the working directory first."""
OTHER_FOLDER = "Set another folder with output=..."


@contextmanager
def safe_path() -> Iterator[None]:
    """Start all child processes of the body with `SAFE_PATH`."""
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def handled_by(handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """Within the body this handles the signals that stop a run; yields the handlers to restore."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the body SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    Only the first signal counts: a second one could end the cleanup before it starts, or the exit after it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        before.clear()
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handled_by(interrupt) as before:
        yield


def signals_ignored() -> AbstractContextManager[object]:
    """Within the body, which must be bounded in time, the signals that stop a run are ignored."""
    return handled_by(signal.SIG_IGN)


@contextmanager
def locked(path: Path, refusal: Callable[[str], str]) -> Iterator[int]:
    """Hold a lock file; yields its descriptor.

    A process that inherits the descriptor keeps the lock until it ends, which `filelock` does not offer.

    Args:
        path: of the file, which is created.
        refusal: makes the error message from the text that the holder wrote with `write_owner`.

    Raises:
        RunError: another process holds the lock, or the folder cannot be made or written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot make {path.parent}: {error}. {OTHER_FOLDER}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunError(refusal(file.read().strip())) from None
        yield file.fileno()


def write_owner(lock: int, text: str) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, text.encode(), 0)
    except OSError as error:
        raise RunError(f"cannot write a lock file in the folder of runs: {error}. {OTHER_FOLDER}") from error


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux; elsewhere nothing happens)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RunError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}")


def descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def collect_orphans(own: int | None = None) -> None:
    """Reap adopted processes that have ended, so that a process that waits for their end sees it; `own` is skipped."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == own:
            return
        os.waitpid(ended.si_pid, 0)


def end_descendants(grace_s: float, spare: int | None = None) -> int:
    """Terminate every descendant, and kill those still alive after `grace_s`; returns their number.

    The walk is repeated until it finds none, because a process may start another one before it ends.

    Args:
        grace_s: seconds before the kill, and again before giving up.
        spare: pid of a process that is left running.

    Raises:
        RunError: some survive the kill, for example in an uninterruptible read.
    """
    asked: set[psutil.Process] = set()
    deadline = time.monotonic() + grace_s
    while living := [process for process in descendants() if process.pid != spare]:
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + grace_s:
            raise RunError(f"these processes do not end: {[process.pid for process in living]}")
        for process in living:
            if late or process not in asked:
                signal_process(process, kill=late)
        asked.update(living)
        psutil.wait_procs(living, timeout=POLL_S)
    collect_orphans()
    return len(asked)


def signal_process(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
