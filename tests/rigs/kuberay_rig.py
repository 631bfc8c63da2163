"""A run on a fake Kubernetes cluster with a fake operator and a real store."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeClock, FakeCluster, FakeOperator
from rich.console import Console

from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.kuberay.attempts import Attempts
from tidemill.kuberay.budget import GpuUsage
from tidemill.kuberay.cluster import RAY_JOBS
from tidemill.kuberay.run_status import Owner, RunStatus
from tidemill.kuberay.watch import EventOutput, Watcher
from tidemill.observe.console import Progress
from tidemill.observe.events import EventLog, StepFinished, event_to_dict
from tidemill.observe.report import Summary
from tidemill.store.attempt import Attempt
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import embedded_store

SUMMARY = Summary(3, None, None, 1.0, 1.0, 1.0, None, None, None, None, None, None, None, None)


def settings(name: str, folder: Path, **kubernetes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": name,
            "model": "s3://models/m",
            "output": folder / "runs",
            "data": {"train": "s3://data/train.jsonl"},
            "rewards": [{"function": "exact_number"}],
            "trainer": {"steps": 3},
            "sync": {"transport": "object_store"},
            "store": {"endpoint": "http://127.0.0.1:9"},
            "tracking": {"uri": "http://127.0.0.1:9"},
            "cluster": {"provider": "kuberay"},
            "kubernetes": {"image": "tidemill:1", **kubernetes},
        }
    )


@dataclass
class Rig:
    """A run on a fake cluster, with a real store."""

    config: RunConfig
    store: ObjectStore
    clock: FakeClock = field(default_factory=FakeClock)
    owner: Owner = field(default_factory=Owner)
    output: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.cluster = FakeCluster(self.clock)
        self.operator = FakeOperator(self.cluster)
        self.logs: list[EventLog] = []

    @property
    def attempts(self) -> Attempts:
        return Attempts(self.config, self.cluster, self.store, self.owner, self.clock)

    def watcher(self) -> Watcher:
        """A new watcher, which remembers nothing."""
        log = EventLog(self.config.folder / "events.jsonl")
        self.logs.append(log)
        output = EventOutput(log, Progress(Console(file=self.output, width=200)))
        return Watcher(self.attempts, output, GpuUsage.load(self.store, self.config.name))

    @property
    def status(self) -> RunStatus:
        return self.attempts.status

    def job(self, number: int = 1) -> str:
        return f"{self.config.name}-a{number}"

    def starts(self, number: int = 1, after: float = 5.0) -> None:
        """KubeRay creates the pods of an attempt, and they start."""
        self.clock.after(after, lambda: self.operator.admit(self.job(number)))
        self.clock.after(after + 10, lambda: self.operator.run(self.job(number)))

    def leaves(self, number: int = 1) -> None:
        """The driver of an attempt succeeds and writes its results."""
        attempt = Attempt(self.config.name, number)
        self.store.put_bytes(attempt.summary, SUMMARY.to_json().encode())
        self.store.put_bytes(attempt.evaluation, b"null")

    def succeeds(self, number: int = 1) -> None:
        self.leaves(number)
        self.operator.succeed(self.job(number))

    def fails(self, number: int, error: BaseException) -> None:
        """The driver of an attempt fails and records why."""
        try:
            raise error
        except type(error) as raised:
            failure = Failure.of("train", raised)
        self.store.put_bytes(Attempt(self.config.name, number).failure, failure.to_json().encode())
        self.operator.fail(self.job(number))

    def steps(self, number: int, *steps: int, offset: int = 0) -> int:
        """The driver of an attempt writes steps; returns the end of the journal."""
        events = [StepFinished(step, 3, step, 1.0, {"reward/mean": step / 10}) for step in steps]
        data = "".join(json.dumps(event_to_dict(event)) + "\n" for event in events).encode()
        self.store.put_bytes(f"{Attempt(self.config.name, number).events}/{offset:012d}.jsonl", data)
        return offset + len(data)

    def left(self) -> list[str]:
        """Names of the objects in the cluster, except events and the status of the run."""
        return [name for kind, name in self.cluster.objects if kind.plural not in ("events", "configmaps")]

    def created(self) -> list[str]:
        """Names of the RayJobs that were created."""
        return [
            name for name in self.cluster.created if name.startswith(f"{self.config.name}-a") and "-cluster" not in name
        ]


def with_kubernetes(rig: Rig, **settings: Any) -> None:
    kubernetes = rig.config.kubernetes.model_copy(update=settings)
    rig.config = rig.config.model_copy(update={"kubernetes": kubernetes})


class Killed(BaseException):
    """The watcher's pod is deleted."""


def killed() -> None:
    raise Killed


def holds_on(rig: Rig, after: float, until: float) -> None:
    """The pods of attempt 1 end at `until`, if it is deleted after `after`."""
    rig.clock.after(after, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))

    def finalize() -> None:
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(until, finalize)


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with embedded_store(tmp_path_factory.mktemp("seaweedfs")) as info:
        yield ObjectStore.connect(info.endpoint, "watched", info.access_key, info.secret_key)


@pytest.fixture
def rig(tmp_path: Path, bucket: ObjectStore) -> Iterator[Rig]:
    rig = Rig(settings(f"run-{secrets.token_hex(3)}", tmp_path), bucket)
    yield rig
    for log in rig.logs:
        log.close()
