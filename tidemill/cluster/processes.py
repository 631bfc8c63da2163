"""The processes that a run leaves behind, and how they end.

The KFP local runner, Ray and vLLM start processes of their own, some in other sessions, and the KFP local runner leaves
its step alone on a signal. So the launcher becomes the reaper of its descendants: whoever loses its parent is then its
child again, and a walk over its children finds every process of the run and no other.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

import psutil

from tidemill.errors import RunError

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux; elsewhere nothing happens).

    Raises:
        RunError: the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RunError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}")


def descendants() -> list[psutil.Process]:
    """Every living process below this one."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that waits to be collected does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def collect_orphans(own: int | None = None) -> None:
    """Collect adopted processes that have ended, so that whoever waits for one sees it go; `own` is left alone."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == own:
            return
        os.waitpid(ended.si_pid, 0)


def end_descendants(grace_s: float, spare: int | None = None) -> int:
    """Ask every descendant to end, and kill those that have not after `grace_s`; returns how many there were.

    The walk is repeated until it finds none, because a process may start another while it is asked.

    Args:
        grace_s: seconds before the kill, and as long again before giving up.
        spare: pid of a process that goes on.

    Raises:
        RunError: some are still there after the kill, for example in an uninterruptible read.
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
    """SIGKILL or SIGTERM, if it is still there."""
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
