"""The preStop hook of head and trainer pods; it runs within the grace period of the pod.

Ray kills all its processes as soon as its container receives SIGTERM, the driver with SIGKILL. So the hook first sends
SIGTERM to the driver, which finishes the current step and commits a checkpoint. That needs the trainer ranks, whose
pods are stopped at the same time: the hook also waits for them. In a pod without a driver or ranks it returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import psutil

from tidemill.retry import wait_for

COMMAND = ["python3", "-m", "tidemill.kuberay.pre_stop"]
GRACE_S = 120
"""Termination grace period of head and trainer pods; a step and a checkpoint that take longer are lost."""
DRIVER = ("-m", "tidemill.driver.job")
RANK = "ray::RankActor"
"""Process title of a trainer rank, set by Ray."""
POLL_S = 0.5
Processes = Callable[[], Iterable[psutil.Process]]


def pre_stop(processes: Processes = psutil.process_iter, poll_s: float = POLL_S) -> None:
    """Terminate the driver, and wait until neither a driver nor a rank is left."""
    for process in matching(processes, is_driver):
        process.terminate()

    def none_left() -> bool:
        return not any(True for _ in matching(processes, lambda command: is_driver(command) or is_rank(command)))

    wait_for(none_left, GRACE_S, poll_s)


def matching(processes: Processes, wanted: Callable[[list[str]], bool]) -> Iterator[psutil.Process]:
    for process in processes():
        try:
            command = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if command and wanted(command):
            yield process


def is_driver(command: list[str]) -> bool:
    """Whether a command line starts a driver; a shell around it has the command in one word and does not match."""
    return DRIVER in pairwise(command)


def is_rank(command: list[str]) -> bool:
    return command[0].startswith(RANK)


if __name__ == "__main__":
    pre_stop()
