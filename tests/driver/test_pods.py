"""A whole run with nothing stubbed, in a Ray cluster of nodes that share neither disk nor memory, like pods.

The head of the first attempt is terminated in the middle, as by a queue that preempts it; the second attempt continues.

Every node is a `ray start` in a mount namespace of its own, with its own /dev/shm and its own disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from free_port import free_port
from tiny_model import make_tiny_model

from tidemill.driver.failure import Failure
from tidemill.driver.job import FAILED, TERMINATED
from tidemill.observe.events import EvaluationFinished, PhaseStarted, StepFinished, event_from_dict
from tidemill.observe.report import Summary
from tidemill.store.attempt import Attempt
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.journal import JournalReader
from tidemill.store.lease import lease_key
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store
from tidemill.tracking.mlflow_server import make_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), pytest.mark.filterwarnings("default")]
STEPS, TIMEOUT_S = 12, 1500
TRAINERS = {"tidemill_trainer": 1, "tidemill_service": 1000}
NODES = {"trainer-0": TRAINERS, "trainer-1": TRAINERS, "rollout": {"tidemill_rollout": 1}}


def apart() -> bool:
    """Whether this machine allows mount namespaces."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return bool(shutil.which("unshare")) and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait(20)


AGENT_PORTS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)


def ray_start(*options: str) -> list[str]:
    """With fixed ports: on a busy machine a node gives up while it waits for the ports of its agents."""
    ports = ["--min-worker-port=0", "--max-worker-port=0", *(f"--{name}={free_port()}" for name in AGENT_PORTS)]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=80000000"]
    return [*ray, "--disable-usage-stats", *ports, *options]


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        environment: of the head pod's process.
        scratch: the disk of the pods; on every node another one.
        nodes: processes by name.
    """

    environment: dict[str, str]
    scratch: Path
    nodes: dict[str, subprocess.Popen[bytes]]

    def disk(self, node: str) -> Path:
        """The scratch folder of a node."""
        return Path(f"/proc/{self.nodes[node].pid}/root{self.scratch}")


@contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[Cluster]:
    """A head in this mount namespace, and other nodes in their own."""
    scratch, port = folder / "scratch", free_port()
    scratch.mkdir()
    own = f'"{scratch}" /dev/shm "{environment["RAY_TMPDIR"]}"'
    mount = f'for own in {own}; do mount -t tmpfs tmpfs "$own" || exit; done; exec "$@"'
    with ExitStack() as stack:
        head = ray_start("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false")
        stack.enter_context(process(head, environment, folder / "head.log"))
        wait_for_node(folder / "head.log")
        nodes = {}
        for name, resources in NODES.items():
            join = ray_start(f"--address=127.0.0.1:{port}", "--num-cpus=1", f"--resources={json.dumps(resources)}")
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", *join]
            nodes[name] = stack.enter_context(process(command, environment, folder / f"{name}.log"))
            wait_for_node(folder / f"{name}.log")  # one after the other: Ray gives each 30 s
        yield Cluster(environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}, scratch, nodes)


def wait_for_node(log: Path) -> None:
    deadline = time.monotonic() + 240
    while "Ray runtime started" not in (text := log.read_text()):
        assert time.monotonic() < deadline and "Exception" not in text, text
        time.sleep(0.2)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 240
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


def settings(folder: Path, store: ObjectStore, mlflow: str) -> dict[str, Any]:
    """Model and prompts in the store; the reward counts even words."""
    store.upload_folder(make_tiny_model(folder / "model", seed=0), "models/tiny")
    rows = [json.dumps({"prompt": f"w{first} w{first + 1}"}) for first in range(5, 37)]
    store.put_bytes("data/train.jsonl", "\n".join(rows).encode())
    store.put_bytes("data/held_out.jsonl", "\n".join(rows[:4]).encode())
    (folder / "rewards_of_pods.py").write_text(
        "def even(response, *, prompt, answer, extra):\n"
        "    words = response.split()\n"
        "    return sum(int(word[1:]) % 2 == 0 for word in words if word[1:].isdigit()) / max(1, len(words))\n"
    )
    return {
        "name": "pods",
        "model": store.uri("models/tiny"),
        "data": {"train": store.uri("data/train.jsonl"), "held_out": store.uri("data/held_out.jsonl")}
        | {"max_prompt_tokens": 16},
        "rewards": [{"function": "rewards_of_pods:even"}],
        "rollout": {"group_size": 4, "max_new_tokens": 8, "dtype": "float32", "threads": 1},
        "trainer": {"steps": STEPS, "ppo_mini_batch_size": 4, "ranks": 2, "learning_rate": 0.003}
        | {"precision": "float32", "threads": 1},
        "sync": {"transport": "object_store"},
        "checkpoint": {"every": 2},
        "store": {"endpoint": store.endpoint},
        "tracking": {"uri": mlflow},
        "cluster": {"provider": "kuberay"},
        "kubernetes": {"gpu_resource": None, "start_timeout_s": 900},
    }


def told_to_end(job: list[str], cluster: Cluster, folder: Path) -> int:
    """Start an attempt, and terminate it after its first step; returns the exit status."""
    events, deadline = cluster.scratch / "pods" / "events.jsonl", time.monotonic() + TIMEOUT_S
    with (folder / "first.log").open("wb") as output:
        first = subprocess.Popen(job, env=cluster.environment, cwd=folder, stdout=output, stderr=output)
    try:
        while not (events.exists() and '"step_finished"' in events.read_text()):
            assert first.poll() is None and time.monotonic() < deadline, (folder / "first.log").read_text()
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        return first.wait(TIMEOUT_S)
    finally:
        first.kill()
        first.wait()


@dataclass(frozen=True)
class Trained:
    """The results of both attempts; status and screen are those of the second."""

    first_status: int
    status: int
    screen: str
    store: ObjectStore
    cluster: Cluster
    mlflow: str

    @property
    def events(self) -> list[Any]:
        journals = (JournalReader(self.store, Attempt("pods", number).events).read() for number in (1, 2))
        return [event_from_dict(json.loads(line)) for journal in journals for line in journal.splitlines()]

    @property
    def summary(self) -> Summary:
        return Summary.from_json(self.store.get_bytes(Attempt("pods", 2).summary).decode())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    if not apart():
        pytest.skip("mount namespaces are not allowed here")
    folder, port = tmp_path_factory.mktemp("pods"), free_port()
    with ExitStack() as stack:
        server = stack.enter_context(embedded_store(folder / "store"))
        store = ObjectStore.connect(server.endpoint, "tidemill", server.access_key, server.secret_key)
        mlflow = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        mlflow += ["--artifacts-destination", str(folder / "artifacts"), "--port", str(port), "--workers", "1"]
        stack.enter_context(process(mlflow, dict(os.environ), folder / "mlflow.log"))
        tree = settings(folder, store, f"http://127.0.0.1:{port}")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)]),
            "RAY_TMPDIR": stack.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "TIDEMILL_S3_ACCESS_KEY": server.access_key,
            "TIDEMILL_S3_SECRET_KEY": server.secret_key,
            "TIDEMILL_CONFIG": yaml.safe_dump(tree),
            "TIDEMILL_ATTEMPT": "1",
            "TIDEMILL_SCRATCH": str(folder / "scratch"),
        }
        made = stack.enter_context(cluster(folder, environment))
        wait_for_port(port)
        job = [sys.executable, "-m", "tidemill.driver.job"]
        first_status = told_to_end(job, made, folder)
        shutil.rmtree(made.scratch / "pods")  # of the head, which would be another pod
        again = made.environment | {"TIDEMILL_ATTEMPT": "2"}
        done = subprocess.run(
            job, env=again, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        screen = done.stdout + done.stderr
        yield Trained(first_status, done.returncode, screen, store, made, f"http://127.0.0.1:{port}")


def test_terminated_head_commits_and_another_attempt_continues(trained: Trained) -> None:
    failure = Failure.from_json(trained.store.get_bytes(Attempt("pods", 1).failure).decode(), "first")
    assert (trained.first_status, failure.retryable) == (FAILED, True)
    done = re.fullmatch(f"{TERMINATED} after ([0-9]+) steps; the checkpoint is (s3://.*)", failure.message)
    assert done is not None and 1 <= int(done[1]) < STEPS
    assert not trained.store.exists(Attempt("pods", 1).summary)


def test_run_trains_to_its_end(trained: Trained) -> None:
    log = JournalReader(trained.store, Attempt("pods", 2).log).read().decode(errors="replace")
    assert trained.status == 0, trained.screen + log[-5000:]
    assert [event.step for event in trained.events if isinstance(event, StepFinished)] == list(range(1, STEPS + 1))
    assert trained.summary.steps == STEPS
    steps = [event.metrics for event in trained.events if isinstance(event, StepFinished)]
    gaps = [metrics["sync/canary_gap"] for metrics in steps if "sync/canary_gap" in metrics]
    assert 0 <= max(gaps) < 1e-3


def test_pods_are_waited_for_and_named(trained: Trained) -> None:
    phases = [event.name for event in trained.events if isinstance(event, PhaseStarted)]
    assert any("downloaded by each pod" in phase for phase in phases)


def test_every_pod_but_the_head_has_the_model_on_its_disk(trained: Trained) -> None:
    for node in NODES:
        assert (trained.cluster.disk(node) / "pods" / "start" / "config.json").is_file(), node
    assert not (trained.cluster.scratch / "pods" / "start").exists()
    exported = [node for node in NODES if (trained.cluster.disk(node) / "pods" / "model").is_dir()]
    assert len(exported) == 1 and exported[0].startswith("trainer")


def test_exported_model_is_scored_by_another_engine(trained: Trained) -> None:
    evaluation = json.loads(trained.store.get_bytes(Attempt("pods", 2).evaluation))
    assert len(evaluation["answers"]) == 4
    assert 0.0 <= evaluation["score"] <= 1.0
    assert not any(isinstance(event, EvaluationFinished) and event.step == STEPS for event in trained.events)


def test_checkpoint_is_in_the_store_and_nothing_else_is_left(trained: Trained) -> None:
    last = [event for event in trained.events if isinstance(event, StepFinished)][-1]
    assert Checkpoints(trained.store, "pods", 2).versions()[0] == last.version
    assert trained.store.list("runs/pods/weights") == ()
    assert json.loads(trained.store.get_bytes(lease_key("pods")))["released"]


def test_mlflow_holds_the_run(trained: Trained) -> None:
    run = make_client(trained.mlflow).get_run(trained.summary.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["reward/mean"] >= 0.0
