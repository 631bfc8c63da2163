"""What a head or trainer pod does before it is ended, within the grace period that Kubernetes gives it.

Ray ends all its processes as soon as its container is told to end, the driver by SIGKILL. So the driver is asked first:
it finishes the step under way and commits a checkpoint. For that the ranks must still be there, in pods that are told
to end at the same time. Where nothing runs any more this takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import psutil

DRIVER = ("-m", "tidemill.driver.job")
RANK = "ray::RankActor"
"""How Ray calls a process with a trainer rank."""
POLL_S = 0.5
Alive = Callable[[], Iterable[psutil.Process]]


def farewell(alive: Alive = psutil.process_iter) -> None:
    """Ask the driver to end, and wait until neither it nor a rank is left.

    Args:
        alive: the processes to look at; by default all of the container.
    """
    for process in holding(alive, is_driver):
        process.terminate()
    while any(True for _ in holding(alive, lambda words: is_driver(words) or is_rank(words))):
        time.sleep(POLL_S)


def holding(alive: Alive, wanted: Callable[[list[str]], bool]) -> Iterator[psutil.Process]:
    """Running processes whose command line is wanted."""
    for process in alive():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if words and wanted(words):
            yield process


def is_driver(words: list[str]) -> bool:
    """Whether a command line holds the schedule of a run; that of a shell around it, in one word, does not."""
    return DRIVER in pairwise(words)


def is_rank(words: list[str]) -> bool:
    """Whether a command line is that of a trainer rank."""
    return words[0].startswith(RANK)


if __name__ == "__main__":
    farewell()
