"""Worker processes that end with every process they have started.

A reward may start compilers, shells or the code of a model. When its worker is killed, nothing else would end these:
they would take the cores of the engines until the run ends. A process belongs to a worker if it is a descendant, if it
is in the worker's session, or if it has inherited the worker's mark in its environment, by which a child that calls
`setsid` is found too.
Worker processes import this module, so it is small.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess

import psutil

LOG = logging.getLogger(__name__)
MARK = "TIDEMILL_REWARD_WORKER"
END_TIMEOUT_S = 10.0
POLL_S = 0.01


def begin_process_tree() -> None:
    """Give this worker a session of its own, and a mark that its children inherit."""
    os.setsid()
    os.environ[MARK] = str(os.getpid())


def end_process_tree(pid: int) -> None:
    """Kill every process that belongs to a worker, dead or alive, but not the worker itself.

    Repeated until none is left, because a process may start another one before it ends. After `END_TIMEOUT_S` the rest
    is logged.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while living := list(members(pid)):
        if time.monotonic() > deadline:
            LOG.warning("processes that a reward has started do not end: %s", [process.pid for process in living])
            return
        for process in living:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        time.sleep(POLL_S)


def members(pid: int) -> Iterator[psutil.Process]:
    """Living processes that belong to the worker of this id."""
    descendants: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        descendants.update(psutil.Process(pid).children(recursive=True))
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            if process.pid == pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process in descendants or os.getsid(process.pid) == pid or process.environ().get(MARK) == str(pid):
                yield process


class WorkerProcess(SpawnProcess):
    """A process whose whole tree ends when it is terminated, and when it has died by itself."""

    _ended = False

    def terminate(self) -> None:
        """Kill the tree; the worker is stopped first, so that it starts nothing more."""
        if self.pid is None or not self.is_alive():
            return
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).suspend()
        end_process_tree(self.pid)
        self.kill()

    def is_alive(self) -> bool:
        alive = super().is_alive()
        if not alive and self.pid is not None and not self._ended:
            self._ended = True
            end_process_tree(self.pid)
        return alive


class WorkerContext(SpawnContext):
    """Starts worker processes."""

    Process = WorkerProcess
