"""The attempts at a run: their RayJobs, named after the run, and the results that they leave in the store.

RUN-a1 failed, deleted     RUN-a2 lost its head, deleted     RUN-a3 runs

The watcher and a client that ends the run need no lock. The client first closes the run in its ConfigMap and then
deletes the RayJobs that exist; the watcher first creates a RayJob and then reads the ConfigMap. At least one of the two
sees what the other did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tidemill.config.names import (
    HEARTBEAT,
    KFP_RUN_LABEL,
    RUN_LABEL,
    WORKFLOW_ANNOTATION,
    attempt_of,
    job_name,
    selector,
)
from tidemill.config.run import RunConfig
from tidemill.driver.failure import Failure
from tidemill.errors import ClusterError, ConfigError, RunError, StoreError, TidemillError
from tidemill.kuberay.cluster import PODS, RAY_JOBS, Cluster, Object, labels_of, name_of, seconds
from tidemill.kuberay.job_state import NODE_TYPE, JobState, Phase
from tidemill.kuberay.manifest import ray_job
from tidemill.kuberay.run_status import Owner, RunStatus
from tidemill.observe.report import Summary
from tidemill.retry import retrying, wait_for
from tidemill.store.attempt import Attempt, latest_attempt
from tidemill.store.object_store import ObjectStore

REMOVAL_TIMEOUT_S = 300.0
"""More than the termination grace period of the pods and the time that KubeRay needs to notice."""
POLL_S = 2.0
LOG_LINES = 30
ENDED = frozenset({"Complete", "Failed", "ValidationFailed"})
T = TypeVar("T")


class Clock(Protocol):
    """The time in seconds since 1970, and a way to wait: the module `time`, or one of a test."""

    def time(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class RemoteTraceback(Exception):
    """Text of a driver's traceback."""


@dataclass(slots=True)
class Attempts:
    """The attempts at one run."""

    config: RunConfig
    cluster: Cluster
    store: ObjectStore
    owner: Owner
    clock: Clock
    status: RunStatus = field(init=False)

    def __post_init__(self) -> None:
        self.status = RunStatus(self.cluster, self.config.name, self.owner)

    def jobs(self) -> list[Object]:
        """RayJobs of the run, oldest attempt first, without those that are being deleted."""
        found = self.cluster.list(RAY_JOBS, selector(self.config.name))
        present = [job for job in found if not job["metadata"].get("deletionTimestamp")]
        return sorted(present, key=lambda job: attempt_of(labels_of(job)))

    def newest(self) -> int | None:
        """Number of the newest attempt that has a RayJob; the RayJob is adopted by this pipeline run."""
        jobs = self.jobs()
        if not jobs:
            return None
        self.adopt(jobs[-1])
        return attempt_of(labels_of(jobs[-1]))

    def newest_stored(self) -> int:
        """Number of the newest attempt that left anything in the store; 0 before the first."""
        return latest_attempt(self.store, self.config.name)

    def active(self) -> int | None:
        """Number of the newest attempt if it has not ended; its RayJob is adopted by this pipeline run."""
        jobs = self.jobs()
        return None if not jobs or has_ended(jobs[-1]) else self.newest()

    def replace(self) -> int:
        """Delete the RayJobs of all earlier attempts, then create the RayJob of a new one."""
        earlier = [attempt_of(labels_of(job)) for job in self.jobs()]
        for number in earlier:
            self.remove(number)
        number = max([*earlier, self.newest_stored()]) + 1
        self.create(number)
        return number

    def continue_with(self, number: int) -> None:
        """Create the RayJob of a further attempt."""
        reason = self.status.closed()
        if reason is not None:
            raise ClusterError(f"no further attempt starts: {reason}. Submit the run again to continue it.")
        self.create(number)
        self.remove_if_ended(number)

    def remove_if_ended(self, number: int) -> None:
        reason = self.status.ended()
        if reason is not None:
            self.remove(number)
            raise ClusterError(f"attempt {number} is deleted: {reason}. Submit the run again to continue it.")

    def create(self, number: int) -> None:
        """Create the RayJob of an attempt, or adopt the existing one; one that is being deleted is waited for."""
        manifest = ray_job(self.config, number, self.owner)
        workflow = {} if self.owner.workflow is None else {WORKFLOW_ANNOTATION: self.owner.workflow}
        manifest["metadata"]["annotations"] = {HEARTBEAT: f"{self.clock.time():.0f}"} | workflow
        found = self.cluster.create(RAY_JOBS, manifest)
        if labels_of(found).get(RUN_LABEL) != self.config.name:
            place = f"{name_of(found)} in namespace {self.cluster.namespace}"
            fix = f"RayJob {place} belongs to something else: choose another name."
            raise ConfigError("name", self.config.name, "a name whose RayJobs belong to this run", fix)
        if found["metadata"].get("deletionTimestamp"):
            self.wait_until_removed(number)
            found = self.cluster.create(RAY_JOBS, manifest)
        self.adopt(found)

    def adopt(self, job: Object) -> None:
        """Make this pipeline run the owner of a RayJob, for example when a new pipeline continues an old run."""
        if self.owner.kfp_run is None or labels_of(job).get(KFP_RUN_LABEL) == self.owner.kfp_run:
            return
        change: dict[str, object] = {
            "labels": {KFP_RUN_LABEL: self.owner.kfp_run},
            "annotations": {WORKFLOW_ANNOTATION: self.owner.workflow},
        }
        if self.owner.reference is not None:
            change["ownerReferences"] = [self.owner.reference]
        self.cluster.patch(RAY_JOBS, name_of(job), {"metadata": change})

    def delete(self) -> None:
        """Start the deletion of all RayJobs of the run."""
        for job in self.jobs():
            self.cluster.delete(RAY_JOBS, name_of(job))

    def remove(self, number: int) -> None:
        """Delete the RayJob of an attempt and wait until nothing of it holds a GPU."""
        repeat(lambda: self.cluster.delete(RAY_JOBS, job_name(self.config.name, number)), self.clock)
        self.wait_until_removed(number)

    def wait_until_removed(self, number: int) -> None:
        run = selector(self.config.name)
        wait_until_removed(self.cluster, run, lambda obj: attempt_of(labels_of(obj)) == number, self.clock)

    def result(self, attempt: Attempt) -> Summary | None:
        """The summary of an attempt that succeeded; the score of the model is the last object that it writes."""
        if not (self.store.exists(attempt.summary) and self.store.exists(attempt.evaluation)):
            return None
        return Summary.from_json(self.store.get_bytes(attempt.summary).decode())

    def failure(self, attempt: Attempt) -> Failure | None:
        if not self.store.exists(attempt.failure):
            return None
        return Failure.from_json(self.store.get_bytes(attempt.failure).decode(), self.store.uri(attempt.failure))

    def error(self, attempt: Attempt, state: JobState) -> TidemillError:
        """The error of an attempt that is over; RunError if another attempt may succeed."""
        failure = self.failure(attempt)
        if failure is not None:
            return remote_error(failure)
        if state.phase is Phase.GONE:
            return self.verdict(attempt) or ClusterError(
                f"RayJob {job_name(self.config.name, attempt.number)} was deleted from outside, for example by "
                "`tidemill stop --now`. Submit the run again to continue from its newest checkpoint."
            )
        reason = state.fatal or f"the driver ended without a result: {state.progress}"
        if state.phase in (Phase.RUNNING, Phase.FAILED) and "\n" not in reason:  # else it quotes the driver already
            reason = "\n".join(filter(None, (reason, self.last_log_lines(attempt.number))))
        if state.retryable or (state.fatal is None and state.phase is not Phase.SUCCEEDED):
            return RunError(reason)
        return ClusterError(reason)

    def record_verdict(self, attempt: Attempt, error: TidemillError) -> None:
        """Record that no attempt follows, so that a retried step raises the same error and starts no attempt."""
        try:
            self.store.put_bytes(attempt.verdict, str(error).encode())
        except StoreError as cause:
            error.add_note(f"A retry of this step starts a new attempt, because this could not be recorded: {cause}")

    def verdict(self, attempt: Attempt) -> ClusterError | None:
        if not self.store.exists(attempt.verdict):
            return None
        return ClusterError(self.store.get_bytes(attempt.verdict).decode())

    def last_log_lines(self, number: int) -> str:
        pods = [
            pod
            for pod in self.cluster.list(PODS, selector(self.config.name))
            if attempt_of(labels_of(pod)) == number and labels_of(pod).get(NODE_TYPE) in (None, "head")
        ]
        for pod in sorted(pods, key=lambda pod: labels_of(pod).get(NODE_TYPE, "")):
            text = self.cluster.log(name_of(pod), lines=LOG_LINES).strip()
            if text:
                return f"the last lines of pod {name_of(pod)}:\n{text}"
        return ""


def remote_error(failure: Failure) -> TidemillError:
    """The error of a driver, with its traceback as the cause."""
    text = failure.message if failure.expected else f"{failure.error}: {failure.message}\n{failure.origin.strip()}"
    error: TidemillError = RunError(text) if failure.retryable else TidemillError(text)
    error.__cause__ = RemoteTraceback(failure.trace)
    return error


def has_ended(job: Object) -> bool:
    """Whether KubeRay is done with a RayJob; it then deletes the RayCluster, but never the RayJob."""
    return (job.get("status") or {}).get("jobDeploymentStatus") in ENDED


def ended_at(job: Object | None) -> float | None:
    """When the job of a RayJob ended, in seconds since 1970; None before that, or without a RayJob."""
    end = ((job or {}).get("status") or {}).get("endTime")
    return None if end is None else seconds(end)


def repeat(call: Callable[[], T], clock: Clock) -> T:
    """Repeat an idempotent call while the API server is away, for as long as a removal may take: GPUs depend on it."""
    return retrying(RunError, REMOVAL_TIMEOUT_S, POLL_S, now=clock.time, sleep=clock.sleep)(call)


def wait_until_removed(cluster: Cluster, selected: str, matches: Callable[[Object], bool], clock: Clock) -> None:
    """Wait until none of the RayJobs and pods that a selector and a predicate choose exists.

    Raises:
        RunError: some still exist after `REMOVAL_TIMEOUT_S`.
    """
    left: list[str] = []

    def none_left() -> bool:
        found = [(kind, obj) for kind in (RAY_JOBS, PODS) for obj in cluster.list(kind, selected)]
        left[:] = [f"{kind.plural}/{name_of(obj)}" for kind, obj in found if matches(obj)]
        return not left

    removed = wait_for(lambda: repeat(none_left, clock), REMOVAL_TIMEOUT_S, POLL_S, now=clock.time, sleep=clock.sleep)
    if not removed:
        raise RunError(
            f"{', '.join(left)} still exist {REMOVAL_TIMEOUT_S:.0f} s after their deletion. Check that the KubeRay "
            f"operator runs, and see `kubectl describe` of these objects in namespace {cluster.namespace}."
        )
