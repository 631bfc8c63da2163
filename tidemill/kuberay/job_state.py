"""The state of an attempt, from its RayJob, the pods and their events. Pure.

KubeRay reports "Initializing" as long as a pod has no node or no image, so the state is read from the pods themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tidemill.driver.failure import PERMANENT_FAILURE
from tidemill.kuberay.cluster import Object, condition_of, labels_of, name_of, seconds
from tidemill.kuberay.submitter import driver_failure

NODE_TYPE = "ray.io/node-type"
QUEUE = "kueue.x-k8s.io/queue-name"

GRACE_S = 45.0
"""A pod without image or node fails the attempt after this time, unless there is a sign that it may still get one."""
CONFIG_GRACE_S = 30.0
"""The same for a missing secret."""
HEAD_GRACE_S = 120.0
"""The head pod is lost if it has not been ready for longer."""
IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError"})
SCALING = frozenset({"TriggeredScaleUp", "Nominated"})
"""Events of Cluster Autoscaler and Karpenter that announce a new node for a pod."""
TEMPORARY = ("were unschedulable", "not-ready", "unreachable", "-pressure", "Too many pods", "uninitialized")
"""Parts of the scheduler's message about a node that may take the pod later."""
FIX_NODES = (
    "Correct kubernetes.gpu_type, node_selector, tolerations or the sizes of the pods, or add such a node: `kubectl "
    "describe nodes` shows the nodes."
)

# Reasons of a failed RayJob: the error, and whether another attempt may succeed.
FAILURES: Mapping[str, tuple[str, bool]] = {
    "DeadlineExceeded": ("the run took longer than kubernetes.max_hours", False),
    "PreRunningDeadlineExceeded": ("the cluster did not run within kubernetes.start_timeout_s", False),
    "ValidationFailed": ("KubeRay refuses the RayJob", False),
    "AppFailed": ("the driver failed", True),
    "SubmissionFailed": ("the driver could not be started, or the connection to it was lost", True),
    "JobStatusCheckTimeoutExceeded": ("the head pod did not answer", True),
    "JobDeploymentStatusTransitionGracePeriodExceeded": ("the driver was lost", True),
}


class Phase(StrEnum):
    """Of an attempt."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JobState:
    """State of an attempt."""

    phase: Phase
    progress: str  # the phase in words
    waiting: Mapping[str, str] = field(default_factory=dict)  # why a pod does not run yet, by the name of the pod
    fatal: str | None = None  # why the attempt is over or must be ended; None while it can continue
    retryable: bool = False  # whether another attempt may succeed

    @property
    def over(self) -> bool:
        return self.fatal is not None or self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a pod does not run."""

    reason: str
    since: float  # seconds since 1970
    fatal: str | None = None  # the error if more waiting cannot help
    grace_s: float = GRACE_S  # how long the pod may wait in spite of that

    def over(self, now: float) -> bool:
        return self.fatal is not None and now - self.since >= self.grace_s


def assess(job: Object | None, pods: Sequence[Object], events: Sequence[Object], now: float) -> JobState:
    """The state of one attempt.

    Args:
        job: the RayJob, None if it does not exist. Read it after the pods: then a missing head of a running job is
            lost, and was not removed after the end of the job.
        pods: pods of its RayCluster, and the submitter pod.
        events: events of the namespace.
        now: seconds since 1970.
    """
    if job is None or job["metadata"].get("deletionTimestamp"):
        return JobState(Phase.GONE, "deleted", fatal="the RayJob was deleted")
    status = job.get("status") or {}
    deployment = status.get("jobDeploymentStatus", "")
    if deployment == "Complete" and status.get("jobStatus") == "SUCCEEDED":
        return JobState(Phase.SUCCEEDED, "succeeded")
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        return failed(status)
    if deployment in ("Suspending", "Suspended") or job["spec"].get("suspend"):
        return JobState(Phase.QUEUED, queued(job))
    waits = {name_of(pod): wait for pod in pods if (wait := waits_for(pod, events)) is not None}
    waiting = {name: wait.reason for name, wait in waits.items()}
    if deployment == "Running":
        lost = head_lost(status, pods, now)
        return JobState(Phase.RUNNING, "running" if lost is None else "lost", waiting, lost, retryable=lost is not None)
    ready = sum(is_ready(pod) for pod in pods)
    progress = f"starting: {ready} of {wanted_pods(job)} pods ready"
    fatal = next((wait.fatal for wait in waits.values() if wait.over(now)), None)
    return JobState(Phase.STARTING, progress, waiting, fatal or refused(job, status, events, now))


def failed(status: Mapping[str, Any]) -> JobState:
    reason, message = status.get("reason", ""), status.get("message", "")
    if status.get("jobStatus") == "STOPPED" and not reason:
        return JobState(Phase.FAILED, "stopped", fatal="the driver was stopped from outside, as by `ray job stop`")
    error, retryable = FAILURES.get(reason, (f"the RayJob failed: {reason or 'no reason given'}", True))
    failure = driver_failure(message)
    if failure is not None:
        code, lines = failure
        message, retryable = f"exit code {code}\n{lines}".rstrip(), retryable and code != PERMANENT_FAILURE
    return JobState(Phase.FAILED, "failed", fatal=f"{error}: {message}" if message else error, retryable=retryable)


def queued(job: Object) -> str:
    queue = labels_of(job).get(QUEUE)
    return f"queued: waits for Kueue's queue {queue}" if queue else "suspended: waits until it is resumed"


def wanted_pods(job: Object) -> int:
    spec = job["spec"].get("rayClusterSpec", {})
    return 1 + sum(int(group.get("replicas", 1)) for group in spec.get("workerGroupSpecs", ()))


def waits_for(pod: Object, events: Sequence[Object]) -> Wait | None:
    """Why a pod does not run; None if it runs or has ended."""
    if pod["status"].get("phase") != "Pending":
        return None
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return unschedulable(pod, scheduled, events)
    since = seconds(pod["status"].get("startTime") or pod["metadata"]["creationTimestamp"])
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting is not None and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return not_started(pod, container, waiting, since)
    warnings = [event for event in events if about(event, pod) and event.get("type") == "Warning"]
    if warnings:
        return Wait(f"{warnings[-1].get('reason')}: {warnings[-1].get('message', '')}", since)
    return Wait("not scheduled yet" if scheduled is None else "its containers are being created", since)


def containers(pod: Object) -> Iterator[Mapping[str, Any]]:
    yield from pod["status"].get("initContainerStatuses") or ()
    yield from pod["status"].get("containerStatuses") or ()


def not_started(pod: Object, container: Mapping[str, Any], waiting: Mapping[str, Any], since: float) -> Wait:
    reason, message = waiting["reason"], waiting.get("message", "")
    text, fatal, grace_s = f"{reason}: {message}" if message else reason, None, GRACE_S
    if reason in IMAGE_REASONS:
        fix = "Correct kubernetes.image or kubernetes.image_pull_secrets, or push the image."
        fatal = f"pod {name_of(pod)} cannot pull its image {container.get('image')}: {text}. {fix}"
    elif reason in CONFIG_REASONS:
        fix = "Create the secret or the key, or correct kubernetes.store_secret or kubernetes.secrets."
        fatal, grace_s = f"pod {name_of(pod)} cannot start: {text}. {fix}", CONFIG_GRACE_S
    return Wait(text, since, fatal, grace_s)


def unschedulable(pod: Object, scheduled: Mapping[str, Any], events: Sequence[Object]) -> Wait:
    """The wait of a pod without a node; not fatal while a node is being added, or if matching nodes are occupied."""
    message = scheduled.get("message") or scheduled.get("reason", "")
    scaling = any(event.get("reason") in SCALING and about(event, pod) for event in events)
    fatal = None
    if not scaling and fits_no_node(message):
        wanted = f"pod {name_of(pod)}, which requests {requests_of(pod)}"
        fatal = f"no node can hold {wanted}: {message.rstrip('. ')}. {FIX_NODES}"
    text = f"{scheduled.get('reason', 'Unschedulable')}: {message}" + ("; a node is being added" if scaling else "")
    return Wait(text, seconds(scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]), fatal)


def fits_no_node(message: str) -> bool:
    """Whether no node could hold a pod even without any other pod, according to the scheduler's message.

    The message counts the nodes where preemption may help and those where it cannot.
    """
    if "no nodes available" in message:
        return True
    total = re.search(r"0/(\d+) nodes are available", message)
    if total is None or any(sign in message for sign in TEMPORARY):
        return False
    _, preemption, after = message.partition("preemption:")
    if not preemption:
        return "Insufficient" not in message
    hopeless = re.search(r"(\d+) Preemption is not helpful", after)
    return hopeless is not None and hopeless[1] == total[1]


def requests_of(pod: Object) -> str:
    requests: dict[str, str] = {}
    for container in pod["spec"].get("containers", ()):
        requests |= container.get("resources", {}).get("requests") or {}
    asked = {**(pod["spec"].get("nodeSelector") or {}), **requests}
    return ", ".join(f"{name}={value}" for name, value in asked.items()) or "nothing"


def refused(job: Object, status: Mapping[str, Any], events: Sequence[Object], now: float) -> str | None:
    """Why the API server refuses the pods of the cluster: quota, pod security, a missing account or priority class."""
    condition = condition_of({"status": status.get("rayClusterStatus") or {}}, "ReplicaFailure")
    if condition is not None and condition["status"] == "True":
        age = now - seconds(condition["lastTransitionTime"])
        return explain_refusal(condition["message"]) if age >= GRACE_S / 3 else None
    owners, created = (name_of(job), status.get("rayClusterName")), seconds(job["metadata"]["creationTimestamp"])
    for event in events:
        refusal = str(event.get("reason", "")).startswith("FailedToCreate")
        if seconds(event.get("lastTimestamp") or job["metadata"]["creationTimestamp"]) < created:
            continue  # about an earlier RayJob of this name
        if refusal and event.get("involvedObject", {}).get("name") in owners and event.get("count", 1) > 1:
            return explain_refusal(event.get("message", ""))
    return None


def explain_refusal(message: str) -> str:
    fixes = {
        "exceeded quota": "Wait for other runs to end, request less, or raise the quota of the namespace.",
        "violates PodSecurity": "The namespace is stricter than these pods: see docs/kubernetes.md.",
        "serviceaccount": "Create the account, or correct kubernetes.service_account.",
        "PriorityClass": "Create the class, or correct kubernetes.trainer_priority_class or rollout_priority_class.",
    }
    fix = next((fix for sign, fix in fixes.items() if sign in message), "")
    cause = message.rpartition("is forbidden: ")[2]
    return f"the cluster refuses the pods of the run: {cause.rstrip('. ')}. {fix}".rstrip()


def head_lost(status: Mapping[str, Any], pods: Sequence[Object], now: float) -> str | None:
    """Why a running job has lost its head, None if it has not. KubeRay creates a new head, which has no job.

    A head that is younger than the submitter pod is a new one. Both creation times come from the API server's clock;
    the start of the job comes from the clock of the head's node.
    """
    started = (status.get("rayJobInfo") or {}).get("startTime")
    if started is None:
        return None
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    submitters = [pod["metadata"]["creationTimestamp"] for pod in alive if NODE_TYPE not in labels_of(pod)]
    heads = [pod for pod in alive if labels_of(pod).get(NODE_TYPE) == "head"]
    if not heads:
        return "the head pod is gone"
    head = heads[0]
    if seconds(head["metadata"]["creationTimestamp"]) > seconds(max(submitters, default=started)):
        return "the head pod was replaced"
    if head["status"].get("phase") in ("Failed", "Succeeded"):
        return f"the head pod ended: {head['status'].get('reason') or last_end(head) or 'no reason given'}"
    for container in containers(head):
        last = container.get("lastState", {}).get("terminated")
        if last is not None and seconds(last.get("finishedAt")) > seconds(started):
            return f"the head's container {container['name']} ended and was restarted: {last.get('reason')}"
    ready = condition_of(head, "Ready")
    if ready is not None and ready["status"] != "True" and now - seconds(ready["lastTransitionTime"]) > HEAD_GRACE_S:
        return f"the head pod has not been ready for {HEAD_GRACE_S:.0f} s: {ready.get('reason', '')}"
    return None


def last_end(pod: Object) -> str | None:
    """Why a container of a pod ended, such as OOMKilled; None if none has."""
    ends = (container.get("state", {}).get("terminated") for container in containers(pod))
    return next((str(end.get("reason")) for end in ends if end is not None), None)


def is_ready(pod: Object) -> bool:
    ready = condition_of(pod, "Ready")
    return NODE_TYPE in labels_of(pod) and ready is not None and ready["status"] == "True"


def about(event: Object, obj: Object) -> bool:
    return bool(event.get("involvedObject", {}).get("name") == name_of(obj))
