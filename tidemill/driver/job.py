"""What runs on the head pod of a run's Ray cluster: `python -m tidemill.driver.job`.

    lease ─► training (main thread, output to log.txt) ─► score of the exported model ─► results
                │                                                                          │
                └─► events.jsonl, log.txt ─► journals (threads) ─► runs/NAME/attempts/N/ ◄─┘ ─► the watcher
    stop.json ─► Stop ─► checkpoint and model after the current step;   SIGTERM ─► immediate Stop ─► checkpoint only

Settings come in TIDEMILL_CONFIG as YAML, the number of the attempt in TIDEMILL_ATTEMPT. What outlives the pod is in the
store; the pods keep no more than a run needs while it goes on, below TIDEMILL_SCRATCH.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from tidemill.actors.scorer import score_remotely
from tidemill.cluster.local import ray_session
from tidemill.config.kubernetes import RANKS_PER_POD
from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import PERMANENT_FAILURE, Failure
from tidemill.driver.run import train
from tidemill.errors import ConfigError, RunError, StoreError, TidemillError, is_retryable
from tidemill.observe.console import redirected, show_events
from tidemill.observe.events import EventLog, PhaseFailed, PhaseStarted
from tidemill.observe.report import Summary
from tidemill.protocols import Evaluation
from tidemill.store.attempt import Attempt
from tidemill.store.journal import JournalWriter
from tidemill.store.lease import Claim, leased
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import open_store
from tidemill.train.stop import Stop

CONFIG, ATTEMPT, SCRATCH = "TIDEMILL_CONFIG", "TIDEMILL_ATTEMPT", "TIDEMILL_SCRATCH"
POLL_S = 5.0
FAILED = 1
TERMINATED = "the driver was told to end"
Train = Callable[[RunConfig, Stop, Claim], Summary]
Score = Callable[[RunConfig, str], Evaluation]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One attempt at a run, with its parts as the tests replace them.

    Attributes:
        config: as it holds in the pods; see `for_pods`.
        attempt: this one.
        train: `run.train`.
        score: of a model of the store.
        stop: ends the training early.
        step: of the pipeline that the attempt is at.
        poll_s: seconds between two looks for a request to stop.
    """

    config: RunConfig
    attempt: Attempt
    train: Train = train
    score: Score = field(default_factory=lambda: score)
    stop: Stop = field(default_factory=Stop)
    step: str = "train"
    poll_s: float = POLL_S

    def run(self) -> int:
        """Do everything; returns the exit status.

        Raises:
            TidemillError: the store cannot be reached, or a newer attempt has the lease. Nothing was begun then, and
                nothing is written to the store.
        """
        folder, claim = self.config.folder, Claim(self.attempt.number, secrets.token_hex(8))
        folder.mkdir(parents=True, exist_ok=True)
        with (
            open_store(self.config.store, self.config.output) as store,
            leased(store, self.config.name, claim),
            redirected(folder / "log.txt") as screen,
            JournalWriter(store, self.attempt.log, folder / "log.txt"),
            JournalWriter(store, self.attempt.events, folder / "events.jsonl"),
        ):
            return self.shown(store, claim, Console(file=screen, width=120))

    def shown(self, store: ObjectStore, claim: Claim, console: Console) -> int:
        """Work, while another thread shows the events on the screen, which Ray keeps as the log of its job."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            lines = threads.submit(show_events, self.config.folder / "events.jsonl", 0, ended, console)
            try:
                self.work(store, claim)
            except Exception as error:  # noqa: BLE001 - the end of the process; it is written down and reported
                console.print(self.give_up(store, error), soft_wrap=True, markup=False)
                return status_of(error)
            finally:
                ended.set()
                lines.result()
        return 0

    def work(self, store: ObjectStore, claim: Claim) -> None:
        """Train, score, and leave the results in the store.

        Raises:
            RunError: the pod is to end: another attempt goes on from the checkpoint.
        """
        with stopped_by_signal(self.stop), stopped_by_request(store, self.attempt, self.stop, self.poll_s):
            summary = self.train(self.config, self.stop, claim)
            if self.stop.immediate:
                raise RunError(f"{TERMINATED}; {summary.checkpoint_uri} holds what was trained, {summary.steps} steps")
            store.put_bytes(self.attempt.summary, summary.to_json().encode())
            evaluation = self.evaluate(summary)
        tree = None if evaluation is None else asdict(evaluation)
        store.put_bytes(self.attempt.evaluation, json.dumps(tree).encode())

    def evaluate(self, summary: Summary) -> Evaluation | None:
        """Score the exported model, if there is one and prompts to score it on."""
        if self.config.data.held_out is None or summary.model_uri is None:
            return None
        self.step = "evaluate"
        with EventLog(self.config.folder / "events.jsonl") as events:
            events.write(PhaseStarted("score the exported model"))
        return self.score(self.config, summary.model_uri)

    def give_up(self, store: ObjectStore, error: Exception) -> str:
        """Write down why the attempt failed, in the log, the events and the store; returns it in words."""
        failure = Failure.of(self.step, error)
        traceback.print_exc()
        with EventLog(self.config.folder / "events.jsonl") as events:
            events.write(PhaseFailed(self.step, failure.message))
        said = f"{failure.step} failed: {failure.message if failure.expected else failure.origin}"
        try:
            store.put_bytes(self.attempt.failure, json.dumps(asdict(failure), indent=2).encode())
        except StoreError as unwritten:
            return f"{said}\nThis could not be written to the store: {unwritten}"
        return said


def score(config: RunConfig, model: str) -> Evaluation:
    """The score of a model of the store, from a fresh engine in a rollout pod; those of the training are gone."""
    with ray_session(config):
        return asyncio.run(score_remotely(config, model))


@contextmanager
def stopped_by_signal(stop: Stop) -> Iterator[None]:
    """Within the body SIGTERM asks for a stop."""

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(TERMINATED, immediate=True)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stopped_by_request(store: ObjectStore, attempt: Attempt, stop: Stop, poll_s: float) -> Iterator[None]:
    """Within the body a request in the store asks for a stop; a thread looks for it."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(poll_s):
            try:
                reason = attempt.asked_to_stop(store)
            except StoreError as error:
                log.warning("cannot see whether the run is to stop: %s", error)
            else:
                if reason is not None:
                    stop.ask(reason)
                    return

    thread = threading.Thread(target=look, name="requests-to-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def for_pods(config: RunConfig, scratch: Path) -> RunConfig:
    """The settings as they hold in the pods: files below `scratch`, and the cores of a pod for who takes all.

    A process in a pod sees all cores of its node, of which the pod may use a few.
    """
    pods, ranks = config.kubernetes, min(config.trainer.ranks, RANKS_PER_POD)
    rollout = config.rollout.model_copy(update={"threads": config.rollout.threads or math.ceil(pods.rollout.cpus)})
    threads = config.trainer.threads or max(1, math.floor(pods.trainer.cpus / ranks))
    trainer = config.trainer.model_copy(update={"threads": threads})
    return config.model_copy(update={"output": scratch, "rollout": rollout, "trainer": trainer})


def from_environment(environment: Mapping[str, str]) -> Job:
    """The job that the environment describes.

    Raises:
        ConfigError: naming the variable.
    """
    text, number = environment.get(CONFIG), environment.get(ATTEMPT, "")
    fix = "The RayJob that `tidemill` makes sets it; this command is not for a shell."
    if not text:
        raise ConfigError(CONFIG, text, "the settings of a run as YAML", fix)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(ATTEMPT, number, "the number of the attempt, from 1", fix)
    config = parse_config(text)
    if config.cluster.provider != "kuberay":
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay on the head pod of a cluster", fix)
    scratch = Path(environment.get(SCRATCH) or Path(tempfile.gettempdir()) / "tidemill")
    return Job(for_pods(config, scratch), Attempt(config.name, int(number)))


def status_of(error: Exception) -> int:
    """Exit status of an attempt that failed: it tells the watcher what the store may not be able to."""
    return FAILED if is_retryable(error) else PERMANENT_FAILURE


def main() -> int:
    """The attempt that this pod is for; returns the exit status."""
    try:
        return from_environment(os.environ).run()
    except TidemillError as error:
        Console(stderr=True, width=120).print(str(error), soft_wrap=True, markup=False)
        return status_of(error)


if __name__ == "__main__":
    sys.exit(main())
