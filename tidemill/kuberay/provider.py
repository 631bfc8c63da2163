"""The steps of a run that takes place in a Ray cluster of its own on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tidemill.config.names import job_name
from tidemill.config.run import RunConfig
from tidemill.errors import TidemillError
from tidemill.kuberay import budget
from tidemill.kuberay.access import check_access
from tidemill.kuberay.attempts import Attempts, WallClock
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.mirror import Screen
from tidemill.kuberay.owner import Owner, this_kfp_run
from tidemill.kuberay.release import release_run
from tidemill.kuberay.run_status import Board
from tidemill.kuberay.watch import Watcher
from tidemill.observe.console import Progress
from tidemill.observe.events import EventLog
from tidemill.observe.report import Summary
from tidemill.protocols import Evaluation, evaluation_from_json
from tidemill.store.attempt import Attempt, latest_attempt
from tidemill.store.lease import remove_lease
from tidemill.store.object_store import ObjectStore
from tidemill.store.server import open_store


@dataclass(frozen=True, slots=True)
class KubernetesProvider:
    """Implements `provider.Provider` with a RayJob for every attempt."""

    config: RunConfig

    def check(self) -> None:
        """See that the cluster has what the run needs, and lets us use it; `tidemill status` too says why not."""
        cluster = self.cluster()
        try:
            check_access(self.config, cluster)
        except TidemillError as error:
            Board(cluster, self.config.name, Owner(this_kfp_run())).fail(error, updated=f"{WallClock().time():.0f}")
            raise

    def provision(self, log: EventLog) -> dict[str, Any]:
        """Have the Ray cluster made, or find the one that is there."""
        with open_store(self.config.store, self.config.output) as store, Progress(Console(soft_wrap=True)) as progress:
            number = self.watcher(store, Screen(log, progress)).provision()
        name = job_name(self.config.name, number)
        return {"attempt": number, "job": name, "namespace": self.config.kubernetes.namespace}

    def train(self, provisioned: Mapping[str, Any], log: EventLog) -> Summary:
        """Follow the run to its end."""
        with open_store(self.config.store, self.config.output) as store, Progress(Console(soft_wrap=True)) as progress:
            return self.watcher(store, Screen(log, progress)).follow(int(provisioned["attempt"]))

    def score(self, summary: Summary) -> Evaluation | None:
        """The score that the last attempt left: it asked the exported model in a fresh engine."""
        del summary
        with open_store(self.config.store, self.config.output) as store:
            attempt = Attempt(self.config.name, latest_attempt(store, self.config.name))
            return evaluation_from_json(store.get_bytes(attempt.evaluation).decode())

    def teardown(self) -> None:
        """Give the GPUs back; the lease of the run ends once nobody can hold it."""
        if release_run(self.cluster(), self.config.name, this_kfp_run(), WallClock()):
            with open_store(self.config.store, self.config.output) as store:
                remove_lease(store, self.config.name)

    def cluster(self) -> KubernetesCluster:
        """Where the run takes place."""
        return KubernetesCluster.connect(self.config.kubernetes.namespace)

    def watcher(self, store: ObjectStore, screen: Screen) -> Watcher:
        """Who looks after its attempts."""
        cluster = self.cluster()
        attempts = Attempts(self.config, cluster, store, Owner.of_this_step(cluster), WallClock())
        board = Board(cluster, self.config.name, attempts.owner)
        return Watcher(attempts, screen, budget.load(store, self.config.name), board)
