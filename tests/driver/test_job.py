"""The head pod's process with stubs for the training and the scoring engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.config.run import RunConfig
from tidemill.driver.failure import PERMANENT_FAILURE, Failure
from tidemill.driver.job import FAILED, TERMINATED, Job, from_environment
from tidemill.errors import ConfigError, EngineError, RunError
from tidemill.observe.events import EventLog, Notice, PhaseStarted
from tidemill.observe.report import Summary
from tidemill.protocols import Answer, Evaluation
from tidemill.store.attempt import Attempt, latest_attempt
from tidemill.store.journal import JournalReader
from tidemill.store.lease import Claim, Fence, lease_key
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store
from tidemill.train.stop import Stop

SUMMARY = Summary(
    *(3, 0.1, None, 1.0, 2.0, 3.0, None, None, 1, None),
    checkpoint_uri="s3://tidemill/runs/a/checkpoints/00000003",
    model_uri="s3://tidemill/runs/a/model/3",
    model_version=None,
    mlflow_run_id="1",
)
EVALUATION = Evaluation(0, 0.5, (Answer("1 + 1", "2", "2", 0.5),))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with embedded_store(tmp_path_factory.mktemp("job")) as info:
        os.environ |= {"TIDEMILL_S3_ACCESS_KEY": info.access_key, "TIDEMILL_S3_SECRET_KEY": info.secret_key}
        yield ObjectStore.connect(info.endpoint, "tidemill", info.access_key, info.secret_key)
        del os.environ["TIDEMILL_S3_ACCESS_KEY"], os.environ["TIDEMILL_S3_SECRET_KEY"]


@pytest.fixture
def store(server: ObjectStore) -> Iterator[ObjectStore]:
    yield server
    server.delete_prefix("runs/a")


def settings(store: ObjectStore, **more: Any) -> str:
    tree = {
        "name": "a",
        "model": "some/model",
        "data": {"train": "s3://tidemill/train.jsonl", "held_out": "s3://tidemill/held_out.jsonl"},
        "rewards": [{"function": "exact_number"}],
        "trainer": {"steps": 5, "ranks": 2},
        "sync": {"transport": "object_store"},
        "store": {"endpoint": store.endpoint},
        "tracking": {"uri": "http://mlflow.test:5000"},
        "cluster": {"provider": "kuberay"},
    }
    return yaml.safe_dump(tree | more)


def job(store: ObjectStore, tmp_path: Path, attempt: int = 1) -> Job:
    variables = {
        "TIDEMILL_CONFIG": settings(store),
        "TIDEMILL_ATTEMPT": str(attempt),
        "TIDEMILL_SCRATCH": str(tmp_path / f"pod-{attempt}"),
    }
    return replace(from_environment(variables), score=lambda config, model: EVALUATION, poll_s=0.01)


def trains(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
    """A training that writes one event and one line of the log."""
    os.write(1, b"chatter of a library\n")
    with EventLog(config.folder / "events.jsonl") as events:
        events.write(PhaseStarted("load the model"))
    return SUMMARY


def waits(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
    """A training that runs until it is stopped."""
    deadline = time.monotonic() + 120
    while stop.reason is None:
        assert time.monotonic() < deadline, "nobody stopped it"
        time.sleep(0.01)
    return replace(SUMMARY, stopped=stop.reason)


def failure_of(store: ObjectStore, attempt: int = 1) -> Failure:
    return Failure(**json.loads(store.get_bytes(Attempt("a", attempt).failure)))


def test_results_events_and_log_are_in_the_store_at_the_end(
    store: ObjectStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert replace(job(store, tmp_path), train=trains).run() == 0
    attempt = Attempt("a", 1)
    assert Summary.from_json(store.get_bytes(attempt.summary).decode()) == SUMMARY
    evaluation = json.loads(store.get_bytes(attempt.evaluation))
    assert (evaluation["score"], evaluation["answers"][0]["prompt"]) == (0.5, "1 + 1")
    lines = JournalReader(store, attempt.events).read().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["load the model", "score the exported model"]
    assert b"chatter of a library" in JournalReader(store, attempt.log).read()
    screen = capfd.readouterr().out
    assert "load the model" in screen and "chatter" not in screen
    assert not store.exists(attempt.failure)


def test_lease_is_held_by_the_training_and_released(store: ObjectStore, tmp_path: Path) -> None:
    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        Fence(store, "a", claim).check()
        return SUMMARY

    assert replace(job(store, tmp_path, attempt=4), train=training).run() == 0
    lease = json.loads(store.get_bytes(lease_key("a")))
    assert (lease["attempt"], lease["released"]) == (4, True)


def test_run_without_held_out_prompts_stores_null(store: ObjectStore, tmp_path: Path) -> None:
    one = job(store, tmp_path)
    data = one.config.data.model_copy(update={"held_out": None})
    assert replace(one, config=one.config.model_copy(update={"data": data}), train=trains).run() == 0
    assert store.get_bytes(one.attempt.evaluation) == b"null"


@pytest.mark.parametrize(
    ("error", "retryable"), [(RunError("rank 0 died"), True), (ConfigError("a", 1, "2", "Correct it."), False)]
)
def test_failure_of_the_training_is_recorded_with_its_traceback(
    store: ObjectStore, tmp_path: Path, capfd: pytest.CaptureFixture[str], error: Exception, retryable: bool
) -> None:
    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        raise error

    assert replace(job(store, tmp_path), train=training).run() == (FAILED if retryable else PERMANENT_FAILURE)
    failure = failure_of(store)
    assert (failure.step, failure.message, failure.retryable) == ("train", str(error), retryable)
    assert "in training" in failure.trace
    assert json.loads(JournalReader(store, Attempt("a", 1).events).read())["kind"] == "phase_failed"
    assert f"train failed: {error}" in capfd.readouterr().out
    assert json.loads(store.get_bytes(lease_key("a")))["released"]


def test_failure_of_the_scoring_leaves_the_summary(store: ObjectStore, tmp_path: Path) -> None:
    def score(config: RunConfig, model: str) -> Evaluation:
        raise EngineError("no engine")

    assert replace(job(store, tmp_path), train=trains, score=score).run() == 1
    assert failure_of(store).step == "evaluate"
    assert store.exists(Attempt("a", 1).summary) and not store.exists(Attempt("a", 1).evaluation)


def test_request_in_the_store_stops_the_training_with_its_reason(store: ObjectStore, tmp_path: Path) -> None:
    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        Attempt("a", 1).ask_to_stop(store, "16 of 16 GPU hours are used")
        return waits(config, stop, claim)

    assert replace(job(store, tmp_path), train=training).run() == 0
    summary = Summary.from_json(store.get_bytes(Attempt("a", 1).summary).decode())
    assert summary.stopped == "16 of 16 GPU hours are used"
    assert store.exists(Attempt("a", 1).evaluation)  # what was trained is scored and may be registered


def test_request_for_another_attempt_is_ignored(store: ObjectStore, tmp_path: Path) -> None:
    Attempt("a", 1).ask_to_stop(store, "the first one")

    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        time.sleep(0.2)
        return replace(SUMMARY, stopped=stop.reason)

    assert replace(job(store, tmp_path, attempt=2), train=training).run() == 0
    assert Summary.from_json(store.get_bytes(Attempt("a", 2).summary).decode()).stopped is None


def test_sigterm_ends_the_training_with_a_retryable_failure(store: ObjectStore, tmp_path: Path) -> None:
    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        os.kill(os.getpid(), signal.SIGTERM)
        return waits(config, stop, claim)

    before = signal.getsignal(signal.SIGTERM)
    assert replace(job(store, tmp_path), train=training).run() == FAILED
    failure = failure_of(store)
    assert failure.retryable and TERMINATED in failure.message and str(SUMMARY.checkpoint_uri) in failure.message
    assert not store.exists(Attempt("a", 1).summary)
    assert signal.getsignal(signal.SIGTERM) is before


def test_attempt_older_than_the_lease_writes_nothing(store: ObjectStore, tmp_path: Path) -> None:
    assert replace(job(store, tmp_path, attempt=2), train=trains).run() == 0
    with pytest.raises(RunError, match="attempt 1 of a may not start: attempt 2 released the lease"):
        replace(job(store, tmp_path, attempt=1), train=trains).run()
    assert store.list(Attempt("a", 1).prefix) == ()
    assert latest_attempt(store, "a") == 2


def test_same_attempt_in_a_new_cluster_continues_its_journals(store: ObjectStore, tmp_path: Path) -> None:
    def training(config: RunConfig, stop: Stop, claim: Claim) -> Summary:
        with EventLog(config.folder / "events.jsonl") as events:
            events.write(Notice(claim.owner))
        return SUMMARY

    for pod in ("one", "two"):
        assert replace(job(store, tmp_path / pod), train=training).run() == 0
    lines = JournalReader(store, Attempt("a", 1).events).read().splitlines()
    notices = [json.loads(line)["text"] for line in lines if b"warning" in line]
    assert len(set(notices)) == 2


def test_settings_of_the_pods_are_filled_in(store: ObjectStore, tmp_path: Path) -> None:
    config = job(store, tmp_path).config
    assert config.output == tmp_path / "pod-1"
    assert (config.rollout.threads, config.trainer.threads) == (8, 8)  # of 8 cores; of 16 for two ranks


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIDEMILL_CONFIG", ""),
        ("TIDEMILL_ATTEMPT", "0"),
        ("TIDEMILL_ATTEMPT", "two"),
        ("TIDEMILL_CONFIG", "name: a"),
    ],
)
def test_missing_environment_variable_is_named(store: ObjectStore, variable: str, value: str) -> None:
    environment = {"TIDEMILL_CONFIG": settings(store), "TIDEMILL_ATTEMPT": "1", variable: value}
    with pytest.raises(ConfigError, match="model" if value == "name: a" else variable):
        from_environment(environment)


def test_other_providers_are_refused(store: ObjectStore) -> None:
    text = settings(store, cluster={"provider": "existing"})
    with pytest.raises(ConfigError, match=r"cluster\.provider = 'existing'"):
        from_environment({"TIDEMILL_CONFIG": text, "TIDEMILL_ATTEMPT": "1"})


def test_process_leaves_its_traceback_in_the_log_and_one_message_on_the_screen(
    store: ObjectStore, tmp_path: Path
) -> None:
    variables = {"TIDEMILL_CONFIG": settings(store), "TIDEMILL_ATTEMPT": "1", "TIDEMILL_SCRATCH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables
    command = [sys.executable, "-m", "tidemill.driver.job"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == PERMANENT_FAILURE, done.stderr
    assert "train failed: cluster.provider = 'kuberay'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert b"Traceback" in JournalReader(store, Attempt("a", 1).log).read()
    assert not failure_of(store).retryable


@pytest.mark.parametrize(
    ("variable", "value", "status", "told"),
    [
        ("TIDEMILL_S3_SECRET_KEY", "wrong", PERMANENT_FAILURE, "Check the keys in TIDEMILL_S3_ACCESS_KEY"),
        ("TIDEMILL_ATTEMPT", "1", FAILED, "attempt 1 of a may not start: attempt 2 took the lease"),
    ],
)
def test_exit_status_tells_whether_to_retry_if_the_store_is_unreachable(
    store: ObjectStore, tmp_path: Path, variable: str, value: str, status: int, told: str
) -> None:
    Fence(store, "a", Claim(2, "b")).take()
    variables = {"TIDEMILL_CONFIG": settings(store), "TIDEMILL_ATTEMPT": "2", "TIDEMILL_SCRATCH": str(tmp_path)}
    environment = os.environ | variables | {variable: value}
    command = [sys.executable, "-m", "tidemill.driver.job"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
