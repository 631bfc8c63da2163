from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from tidemill.actors.ranks import RankActor
from tidemill.kuberay.pre_stop import POLL_S, is_rank, pre_stop

SAYS_READY = "import signal, sys, time; print('ready', flush=True); "
WAITS = SAYS_READY + "time.sleep(600)"
COMMITS = SAYS_READY.replace(
    "print", "signal.signal(signal.SIGTERM, lambda *_: (print('committed', flush=True), sys.exit(0))); print"
)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of a pod, and kills those that are left."""
    with ExitStack() as stack:

        def run(code: str, *words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            stack.callback(process.stdout.close)
            return process

        yield run


def pod() -> list[psutil.Process]:
    return psutil.Process().children()


def test_the_driver_is_terminated_and_waited_for(start: Start) -> None:
    driver = start(COMMITS + "time.sleep(600)", "-m", "tidemill.driver.job")
    other = start(WAITS, "python3 -m tidemill.driver.job")  # a shell around the driver has one word
    pre_stop(pod)
    assert driver.poll() is None or driver.returncode == 0
    assert driver.communicate()[0] == "committed\n"
    assert other.poll() is None


def test_ranks_are_waited_for_and_not_terminated(start: Start) -> None:
    rank = start(WAITS)
    ranks = [Renamed(rank.pid)]
    waiting = threading.Thread(target=pre_stop, args=(lambda: ranks,))
    waiting.start()
    waiting.join(timeout=3 * POLL_S)
    assert waiting.is_alive() and rank.poll() is None
    rank.kill()
    rank.wait()
    waiting.join(timeout=120)
    assert not waiting.is_alive()


class Renamed(psutil.Process):
    """A process with the title of an actor."""

    def cmdline(self) -> list[str]:
        super().cmdline()
        return ["ray::RankActor.step"]


def test_a_pod_without_a_run_ends_at_once(start: Start) -> None:
    start(WAITS, "ray::IDLE")
    pre_stop(pod)


def test_ranks_are_recognised_by_the_name_of_their_actor() -> None:
    assert is_rank([f"ray::{RankActor.__name__}.step"])
    assert not is_rank(["ray::EngineActor"])
