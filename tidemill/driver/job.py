"""The process on the head pod of a run's Ray cluster: `python -m tidemill.driver.job`.

    lease ─► training (main thread, output to log.txt) ─► score of the exported model ─► results
                │                                                                          │
                └─► events.jsonl, log.txt ─► journals (threads) ─► runs/NAME/attempts/N/ ◄─┘ ─► the watcher
    stop.json ─► Stop ─► checkpoint and model after the current step;   SIGTERM ─► immediate Stop ─► checkpoint only

TIDEMILL_CONFIG holds the settings as YAML, TIDEMILL_ATTEMPT the number of the attempt. Everything that outlives the pod
is in the store; files below TIDEMILL_SCRATCH are needed only while the run goes on.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from tidemill.actors.engine import score_remotely
from tidemill.cluster.local import ray_session
from tidemill.config.kubernetes import RANKS_PER_POD
from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.failure import PERMANENT_FAILURE, Failure
from tidemill.driver.run import train
from tidemill.errors import ConfigError, RunError, StoreError, TidemillError, is_retryable
from tidemill.observe.console import redirected, showing_events
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
TERMINATED = "the driver was terminated"
Train = Callable[[RunConfig, Stop, Claim], Summary]
Score = Callable[[RunConfig, str], Evaluation]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One attempt at a run; tests replace its parts.

    Attributes:
        config: the settings for the pods; see `for_pods`.
        attempt: this attempt.
        train: trains the run.
        score: scores a model of the store.
        stop: ends the training early.
        step: the current step of the pipeline.
        poll_s: seconds between two checks for a stop request.
    """

    config: RunConfig
    attempt: Attempt
    train: Train = train
    score: Score = field(default_factory=lambda: score)
    stop: Stop = field(default_factory=Stop)
    step: str = "train"
    poll_s: float = POLL_S

    def run(self) -> int:
        """Train and score; returns the exit status.

        Raises:
            TidemillError: the store cannot be reached, or a newer attempt has the lease. Nothing has started then, and
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
            console = Console(file=screen, width=120)  # Ray keeps it as the log of its job
            with showing_events(folder / "events.jsonl", console, new_only=False):
                try:
                    self.work(store, claim)
                except Exception as error:  # noqa: BLE001 - the end of the process; the error is stored and reported
                    console.print(self.store_failure(store, error), soft_wrap=True, markup=False)
                    return status_of(error)
        return 0

    def work(self, store: ObjectStore, claim: Claim) -> None:
        """Train, score, and put the results into the store.

        Raises:
            RunError: the pod terminates; another attempt resumes from the checkpoint.
        """
        with stop_on_sigterm(self.stop), stop_on_request(store, self.attempt, self.stop, self.poll_s):
            summary = self.train(self.config, self.stop, claim)
            if self.stop.immediate:
                raise RunError(f"{TERMINATED} after {summary.steps} steps; the checkpoint is {summary.checkpoint_uri}")
            store.put_bytes(self.attempt.summary, summary.to_json().encode())
            evaluation = self.evaluate(summary)
        tree = None if evaluation is None else asdict(evaluation)
        store.put_bytes(self.attempt.evaluation, json.dumps(tree).encode())

    def evaluate(self, summary: Summary) -> Evaluation | None:
        """Score the exported model; None without a model or without held-out prompts."""
        if self.config.data.held_out is None or summary.model_uri is None:
            return None
        self.step = "evaluate"
        with EventLog(self.config.folder / "events.jsonl") as events:
            events.write(PhaseStarted("score the exported model"))
        return self.score(self.config, summary.model_uri)

    def store_failure(self, store: ObjectStore, error: Exception) -> str:
        """Write the failure of the attempt to the log, the events and the store; returns a message."""
        failure = Failure.of(self.step, error)
        traceback.print_exc()
        with EventLog(self.config.folder / "events.jsonl") as events:
            events.write(PhaseFailed(self.step, failure.message))
        message = f"{failure.step} failed: {failure.message if failure.expected else failure.origin}"
        try:
            store.put_bytes(self.attempt.failure, json.dumps(asdict(failure), indent=2).encode())
        except StoreError as unwritten:
            return f"{message}\nThis could not be written to the store: {unwritten}"
        return message


def score(config: RunConfig, model: str) -> Evaluation:
    """Score a model of the store with a fresh engine in a rollout pod."""
    with ray_session(config):
        return asyncio.run(score_remotely(config, model))


@contextmanager
def stop_on_sigterm(stop: Stop) -> Iterator[None]:
    """Within the body SIGTERM requests an immediate stop."""

    def ask(number: int, frame: FrameType | None) -> None:
        stop.ask(TERMINATED, immediate=True)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_request(store: ObjectStore, attempt: Attempt, stop: Stop, poll_s: float) -> Iterator[None]:
    """Within the body a thread polls the store for a stop request."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(poll_s):
            try:
                reason = attempt.asked_to_stop(store)
            except StoreError as error:
                log.warning("cannot read the stop request: %s", error)
            else:
                if reason is not None:
                    stop.ask(reason)
                    return

    thread = threading.Thread(target=poll, name="stop-requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def for_pods(config: RunConfig, scratch: Path) -> RunConfig:
    """The settings for the pods: files below `scratch`, and as many threads by default as the pod has cores.

    A process in a pod sees all cores of its node, but may use only those of the pod.
    """
    pods, ranks = config.kubernetes, min(config.trainer.ranks, RANKS_PER_POD)
    rollout = config.rollout.model_copy(update={"threads": config.rollout.threads or math.ceil(pods.rollout.cpus)})
    threads = config.trainer.threads or max(1, math.floor(pods.trainer.cpus / ranks))
    trainer = config.trainer.model_copy(update={"threads": threads})
    return config.model_copy(update={"output": scratch, "rollout": rollout, "trainer": trainer})


def from_environment(environment: Mapping[str, str]) -> Job:
    """The job of this pod.

    Raises:
        ConfigError: naming the variable.
    """
    text, number = environment.get(CONFIG), environment.get(ATTEMPT, "")
    fix = "The RayJob of a run sets it; do not run this command in a shell."
    if not text:
        raise ConfigError(CONFIG, text, "the settings of a run as YAML", fix)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(ATTEMPT, number, "the number of the attempt, from 1", fix)
    config = parse_config(text)
    if config.cluster.provider != "kuberay":
        raise ConfigError("cluster.provider", config.cluster.provider, "kuberay on the head pod of a Ray cluster", fix)
    scratch = Path(environment.get(SCRATCH) or Path(tempfile.gettempdir()) / "tidemill")
    return Job(for_pods(config, scratch), Attempt(config.name, int(number)))


def status_of(error: Exception) -> int:
    """Exit status of a failed attempt, by which the watcher knows whether to retry if the store is unreachable."""
    return FAILED if is_retryable(error) else PERMANENT_FAILURE


def main() -> int:
    """Run the attempt of this pod; returns the exit status."""
    try:
        return from_environment(os.environ).run()
    except TidemillError as error:
        Console(stderr=True, width=120).print(str(error), soft_wrap=True, markup=False)
        return status_of(error)


if __name__ == "__main__":
    sys.exit(main())
