"""A run on a real cluster with a stub of the training, tests/real_cluster/image/run.py."""

from __future__ import annotations

import copy
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes.client import ApiClient
from rich.console import Console

from tidemill.config.names import job_name, selector
from tidemill.config.run import RunConfig
from tidemill.kuberay.attempts import Attempts
from tidemill.kuberay.budget import GpuUsage
from tidemill.kuberay.client import TIMEOUT, KubernetesCluster
from tidemill.kuberay.cluster import PODS, RAY_CLUSTERS, RAY_JOBS, Kind, Object, name_of
from tidemill.kuberay.run_status import Owner
from tidemill.kuberay.watch import EventOutput, Watcher
from tidemill.observe.console import Progress
from tidemill.observe.events import EventLog
from tidemill.observe.report import Summary
from tidemill.retry import wait_for
from tidemill.store.object_store import ObjectStore

IMAGE = os.environ.get("TIDEMILL_TEST_IMAGE", "localhost/tidemill-stub:1")
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts")
QUOTAS = Kind("", "v1", "resourcequotas")
SMALL = {"cpus": 0.1, "memory_gib": 1}
POLL_S = 0.5


def with_token(admin: KubernetesCluster, account: str) -> KubernetesCluster:
    """The cluster with the permissions of a service account of the namespace."""
    path = f"/api/v1/namespaces/{admin.namespace}/serviceaccounts/{account}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = json.loads(admin.send("POST", path, {}, request, TIMEOUT).data)
    configuration = copy.copy(admin.client.configuration)
    configuration.cert_file = configuration.key_file = None
    configuration.api_key = {"authorization": f"Bearer {answer['status']['token']}"}
    return KubernetesCluster(admin.namespace, ApiClient(configuration))


class ClusterRun:
    """One run, as the steps of a pipeline and an administrator see it."""

    def __init__(self, admin: KubernetesCluster, steps: KubernetesCluster, store: ObjectStore, folder: Path) -> None:
        self.admin, self.steps, self.store, self.folder = admin, steps, store, folder
        self.name = f"run-{secrets.token_hex(3)}"
        self.owner = Owner()
        self.output = io.StringIO()
        self.kubernetes: dict[str, Any] = {}
        self.env = {"STUB_STEP_S": "1"}
        self.trainer_steps = 3
        self.tensor_parallel_size = 1

    @property
    def config(self) -> RunConfig:
        """Settings: one trainer rank and one engine, with one pretended GPU each."""
        small = {
            "head": SMALL | {"memory_gib": 2},
            "trainer": SMALL | {"shared_memory_gib": 1},
            "rollout": SMALL | {"shared_memory_gib": 1},
        }
        place = {"namespace": self.admin.namespace, "image": IMAGE, "env": self.env, "keep_s": 0, "max_restarts": 0}
        return RunConfig.model_validate(
            {
                "name": self.name,
                "model": "s3://tidemill/model",
                "output": self.folder / "runs",
                "data": {"train": "s3://tidemill/train.jsonl", "held_out": "s3://tidemill/train.jsonl"},
                "rewards": [{"function": "exact_number"}],
                "rollout": {"tensor_parallel_size": self.tensor_parallel_size},
                "trainer": {"steps": self.trainer_steps},
                "sync": {"transport": "object_store"},
                "store": {"endpoint": self.store.endpoint, "bucket": self.store.bucket},
                "tracking": {"uri": "http://127.0.0.1:9"},
                "cluster": {"provider": "kuberay"},
                "kubernetes": small | place | self.kubernetes,
            }
        )

    @contextmanager
    def watcher(self) -> Iterator[Watcher]:
        """A new watcher with the permissions of a step."""
        config, progress = self.config, Progress(Console(file=self.output, width=200))
        with EventLog(config.folder / "events.jsonl") as log:
            attempts = Attempts(config, self.steps, self.store, self.owner, time)
            yield Watcher(attempts, EventOutput(log, progress), GpuUsage.load(self.store, config.name))

    def provision(self) -> int:
        """The step provision."""
        with self.watcher() as watcher:
            return watcher.provision()

    def follow(self, first: int = 1) -> Summary:
        """The step train."""
        with self.watcher() as watcher:
            return watcher.follow(first)

    @contextmanager
    def followed(self, first: int = 1) -> Iterator[Future[Summary]]:
        """The step train, beside the test."""
        with ThreadPoolExecutor(1) as threads:
            yield threads.submit(self.follow, first)

    def job(self, number: int = 1) -> str:
        """Name of an attempt's RayJob."""
        return job_name(self.name, number)

    def status(self, number: int = 1) -> dict[str, Any]:
        """Status of an attempt's RayJob, empty without one."""
        found = self.admin.get(RAY_JOBS, self.job(number))
        return {} if found is None else dict(found.get("status") or {})

    def until(self, what: Callable[[], object], seconds: float = 240.0) -> None:
        """Wait for something."""
        assert wait_for(what, seconds, POLL_S), f"not within {seconds:.0f} s:\n{self.output.getvalue()}\n{self.left()}"

    def until_shown(self, text: str, seconds: float = 240.0) -> None:
        """Wait until a text is in the log of the step."""
        self.until(lambda: text in self.output.getvalue(), seconds)

    def pods(self) -> list[Object]:
        """Pods of the run."""
        return self.admin.list(PODS, selector(self.name))

    def left(self) -> list[str]:
        """All objects of the run in the cluster."""
        kinds = (RAY_JOBS, RAY_CLUSTERS, PODS)
        return [f"{kind}/{name_of(obj)}" for kind in kinds for obj in self.admin.list(kind, selector(self.name))]

    def clear(self) -> None:
        """Delete all objects of the run."""
        for job in self.admin.list(RAY_JOBS, selector(self.name)):
            self.admin.delete(RAY_JOBS, name_of(job))
        self.until(lambda: not self.left())
