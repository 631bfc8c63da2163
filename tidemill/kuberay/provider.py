"""The steps of a run in its own Ray cluster on Kubernetes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tidemill.config.names import job_name
from tidemill.config.run import RunConfig
from tidemill.errors import TidemillError
from tidemill.kuberay.access import check_access
from tidemill.kuberay.attempts import Attempts
from tidemill.kuberay.budget import GpuUsage
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.release import release_run
from tidemill.kuberay.run_status import Owner, RunStatus, this_kfp_run
from tidemill.kuberay.watch import EventOutput, Watcher
from tidemill.observe.console import Progress
from tidemill.observe.events import EventLog
from tidemill.observe.report import Summary
from tidemill.protocols import Evaluation, evaluation_from_json
from tidemill.store.attempt import Attempt, latest_attempt
from tidemill.store.lease import remove_lease
from tidemill.store.server import open_store


@dataclass(frozen=True, slots=True)
class KubernetesProvider:
    """Implements `provider.Provider` with a RayJob for every attempt."""

    config: RunConfig

    def check(self) -> None:
        """Check that the cluster has what the run needs; a refusal is recorded for `tidemill status`."""
        cluster = self.cluster()
        try:
            check_access(self.config, cluster)
        except TidemillError as error:
            status = RunStatus(cluster, self.config.name, Owner(this_kfp_run()))
            status.fail(error, updated=f"{time.time():.0f}")
            raise

    def provision(self, log: EventLog) -> dict[str, Any]:
        with self.watcher(log) as watcher:
            number = watcher.provision()
        name = job_name(self.config.name, number)
        return {"attempt": number, "job": name, "namespace": self.config.kubernetes.namespace}

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        with self.watcher(log) as watcher:
            return watcher.follow(int(provisioned["attempt"]))

    def score(self, summary: Summary) -> Evaluation | None:
        """The score that the last attempt stored; it evaluated the exported model in a new engine."""
        del summary
        with open_store(self.config.store, self.config.output) as store:
            attempt = Attempt(self.config.name, latest_attempt(store, self.config.name))
            return evaluation_from_json(store.get_bytes(attempt.evaluation).decode())

    def teardown(self) -> None:
        """Release the GPUs; the lease of the run is removed once no attempt can hold it."""
        if release_run(self.cluster(), self.config.name, this_kfp_run(), time):
            with open_store(self.config.store, self.config.output) as store:
                remove_lease(store, self.config.name)

    def cluster(self) -> KubernetesCluster:
        return KubernetesCluster.connect(self.config.kubernetes.namespace)

    @contextmanager
    def watcher(self, log: EventLog) -> Iterator[Watcher]:
        with open_store(self.config.store, self.config.output) as store, Progress(Console(soft_wrap=True)) as progress:
            cluster = self.cluster()
            attempts = Attempts(self.config, cluster, store, Owner.of_this_step(cluster), time)
            yield Watcher(attempts, EventOutput(log, progress), GpuUsage.load(store, self.config.name))
