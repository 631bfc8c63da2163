"""The attempts at a run: their RayJobs, made under names that follow from the run, found again, and taken away.

RUN-a1 failed, gone     RUN-a2 lost its head, gone     RUN-a3 runs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tidemill.config.names import HEARTBEAT, KFP_RUN_LABEL, RUN_LABEL, attempt_of, job_name, selector
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, RunError
from tidemill.kuberay.cluster import PODS, RAY_JOBS, Cluster, Object, labels_of, name_of
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.owner import Owner
from tidemill.kuberay.schema import check
from tidemill.kuberay.state import seconds
from tidemill.store.attempt import latest_attempt
from tidemill.store.object_store import ObjectStore

REMOVAL_TIMEOUT_S = 300.0
"""Longer than pods get to end, 30 s, and KubeRay to look."""
POLL_S = 2.0
T = TypeVar("T")
ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})


class Clock(Protocol):
    """Time, and waiting for it to pass."""

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class WallClock:
    """The time of this machine."""

    def time(self) -> float:
        """See `Clock.time`."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Attempts:
    """The attempts at one run."""

    config: RunConfig
    cluster: Cluster
    store: ObjectStore
    owner: Owner
    clock: Clock

    def jobs(self) -> list[Object]:
        """RayJobs of the run, oldest attempt first, without those that are being deleted."""
        found = self.cluster.list(RAY_JOBS, selector(self.config.name))
        living = [job for job in found if not job["metadata"].get("deletionTimestamp")]
        return sorted(living, key=lambda job: attempt_of(labels_of(job)))

    def live(self) -> int | None:
        """Number of the newest attempt that has a RayJob, which from now on belongs to this pipeline run."""
        jobs = self.jobs()
        if not jobs:
            return None
        self.adopt(jobs[-1])
        return attempt_of(labels_of(jobs[-1]))

    def under_way(self) -> int | None:
        """Number of the newest attempt, if that has not ended."""
        jobs = self.jobs()
        return None if not jobs or has_ended(jobs[-1]) else self.live()

    def begin_next(self) -> int:
        """Begin the attempt after all that there were; what these still have in the cluster goes first."""
        earlier = [attempt_of(labels_of(job)) for job in self.jobs()]
        for number in earlier:
            self.remove(number)
        number = max([*earlier, self.last()]) + 1
        self.begin(number)
        return number

    def last(self) -> int:
        """Number of the newest attempt that left anything in the store; 0 before the first."""
        return latest_attempt(self.store, self.config.name)

    def begin(self, number: int) -> None:
        """Make the RayJob of an attempt, or take over the one that is there; one on its way out is waited for.

        Raises:
            ConfigError: the settings make a RayJob that the cluster would refuse, or something else has its name.
            RunError: the old one does not go.
        """
        owner = self.owner
        manifest = ray_job(
            self.config, number, owner=owner.reference, kfp_run_id=owner.kfp_run, mlflow_run_id=owner.mlflow_run
        )
        manifest["metadata"]["annotations"] = {HEARTBEAT: f"{self.clock.time():.0f}"}
        check(manifest)
        found = self.cluster.create(RAY_JOBS, manifest)
        if labels_of(found).get(RUN_LABEL) != self.config.name:
            fix = f"{name_of(found)} in namespace {self.cluster.namespace} is of something else: take another name."
            raise ConfigError("name", self.config.name, "a name whose RayJobs are its own", fix)
        if found["metadata"].get("deletionTimestamp"):
            self.wait_until_gone([number])
            found = self.cluster.create(RAY_JOBS, manifest)
        self.adopt(found)

    def adopt(self, job: Object) -> None:
        """Have a RayJob belong to this pipeline run, as after a new start of a pipeline that was ended."""
        if self.owner.kfp_run is None or labels_of(job).get(KFP_RUN_LABEL) == self.owner.kfp_run:
            return
        change: dict[str, object] = {"labels": {KFP_RUN_LABEL: self.owner.kfp_run}}
        if self.owner.reference is not None:
            change["ownerReferences"] = [self.owner.reference.as_dict()]
        self.cluster.patch(RAY_JOBS, name_of(job), {"metadata": change})

    def remove(self, number: int) -> None:
        """Delete the RayJob of an attempt and wait until nothing of it holds a GPU."""
        patiently(lambda: self.cluster.delete(RAY_JOBS, job_name(self.config.name, number)), self.clock)
        self.wait_until_gone([number])

    def wait_until_gone(self, numbers: Sequence[int]) -> None:
        """Wait for the end of what belongs to attempts.

        Raises:
            RunError: something is still there after `REMOVAL_TIMEOUT_S`.
        """

        def ours(thing: Object) -> bool:
            return attempt_of(labels_of(thing)) in numbers

        wait_until_none(self.cluster, selector(self.config.name), ours, self.clock)


def patiently(ask: Callable[[], T], clock: Clock) -> T:
    """An answer of the cluster to what may be asked again, also where it is away for some minutes: what gives GPUs back
    gives up last.

    Raises:
        RunError: it is away for longer than `REMOVAL_TIMEOUT_S`.
    """
    deadline = clock.time() + REMOVAL_TIMEOUT_S
    while True:
        try:
            return ask()
        except RunError:
            if clock.time() > deadline:
                raise
            clock.sleep(POLL_S)


def has_ended(job: Object) -> bool:
    """Whether a RayJob is over for KubeRay, which then takes its cluster away, and never the job itself."""
    return (job.get("status") or {}).get("jobDeploymentStatus") in ENDED


def ended_at(job: Object | None) -> float | None:
    """When the job of a RayJob ended, in seconds since 1970; None while it goes on, or where there is none."""
    end = ((job or {}).get("status") or {}).get("endTime")
    return None if end is None else seconds(end)


def wait_until_none(cluster: Cluster, chosen: str, ours: Callable[[Object], bool], clock: Clock) -> None:
    """Wait until no RayJob and no pod is left of those that a selector and a test choose.

    A RayJob that is deleted in the foreground outlives its RayCluster.

    Raises:
        RunError: naming what is left after `REMOVAL_TIMEOUT_S`.
    """

    def look() -> list[str]:
        things = [(kind, thing) for kind in (RAY_JOBS, PODS) for thing in cluster.list(kind, chosen)]
        return [f"{kind.plural}/{name_of(thing)}" for kind, thing in things if ours(thing)]

    deadline = clock.time() + REMOVAL_TIMEOUT_S
    while left := patiently(look, clock):
        if clock.time() > deadline:
            raise RunError(
                f"still there {REMOVAL_TIMEOUT_S:.0f} s after it was deleted: {', '.join(left)}. Look whether the "
                f"KubeRay operator runs, and at `kubectl describe` of these in namespace {cluster.namespace}."
            )
        clock.sleep(POLL_S)
