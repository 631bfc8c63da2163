"""What the state of a RayJob means for a run, from the job, its pods and their events. Pure.

KubeRay says "Initializing" for as long as a pod has no node or no image, so the pods themselves are asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from tidemill.driver.failure import PERMANENT_FAILURE
from tidemill.kuberay.cluster import Object, labels_of, name_of
from tidemill.kuberay.driver_log import end_of_driver

NODE_TYPE = "ray.io/node-type"
QUEUE = "kueue.x-k8s.io/queue-name"

GRACE_S = 45.0
"""A pod without image or node for so long is not waited for any more, where nothing says that it may still get it."""
CONFIG_GRACE_S = 30.0
"""The same for a secret that is not there: it comes in time or not at all."""
HEAD_GRACE_S = 120.0
"""So long may a head pod not answer its probes."""
IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError"})
SCALING = frozenset({"TriggeredScaleUp", "Nominated"})
"""Events by which Cluster Autoscaler and Karpenter say that they make a node for a pod."""
FOR_A_WHILE = ("were unschedulable", "not-ready", "unreachable", "-pressure", "Too many pods", "uninitialized")
"""In the scheduler's words: a node that may take the pod later."""
NO_PLACE = (
    "Mend kubernetes.gpu_type, node_selector, tolerations or the sizes of the pods, or add such a node: `kubectl "
    "describe nodes` shows what there is."
)

# How a RayJob ends badly: what to tell, and whether a new cluster may do better.
ENDINGS: Mapping[str, tuple[str, bool]] = {
    "DeadlineExceeded": ("the run took longer than kubernetes.max_hours", False),
    "PreRunningDeadlineExceeded": ("the cluster did not run within kubernetes.start_timeout_s", False),
    "ValidationFailed": ("KubeRay refuses the RayJob", False),
    "AppFailed": ("the driver failed", True),
    "SubmissionFailed": ("the driver could not be started, or the connection to it was lost", True),
    "JobStatusCheckTimeoutExceeded": ("the head pod did not answer", True),
    "JobDeploymentStatusTransitionGracePeriodExceeded": ("the driver was lost", True),
}


class Phase(StrEnum):
    """Where an attempt stands."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JobState:
    """An attempt as its watcher sees it.

    Attributes:
        phase: where it stands.
        progress: that in words.
        waiting: why a pod does not run yet, by its name.
        fatal: why the attempt is over, or has to be ended; None while it may go on.
        retryable: whether another attempt may do better.
    """

    phase: Phase
    progress: str
    waiting: Mapping[str, str] = field(default_factory=dict)
    fatal: str | None = None
    retryable: bool = False

    @property
    def over(self) -> bool:
        """Whether the attempt has ended or has to."""
        return self.fatal is not None or self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a pod does not run.

    Attributes:
        reason: as Kubernetes says it.
        since: when it began, in seconds since 1970.
        fatal: what to tell where waiting on cannot help.
        grace_s: how long it is waited for all the same.
    """

    reason: str
    since: float
    fatal: str | None = None
    grace_s: float = GRACE_S

    def over(self, now: float) -> bool:
        """Whether it has been waited for long enough."""
        return self.fatal is not None and now - self.since >= self.grace_s


def assess(job: Object | None, pods: Sequence[Object], events: Sequence[Object], now: float) -> JobState:
    """What the objects of one attempt say.

    Args:
        job: the RayJob, None if there is none. It is read after the pods, so that a head which is missing while the job
            runs is lost and not cleaned up.
        pods: of its cluster, and the one that submitted the driver.
        events: of the namespace.
        now: seconds since 1970.
    """
    if job is None or job["metadata"].get("deletionTimestamp"):
        return JobState(Phase.GONE, "deleted", fatal="the RayJob was deleted")
    status = job.get("status") or {}
    deployment = status.get("jobDeploymentStatus", "")
    if deployment == "Complete" and status.get("jobStatus") == "SUCCEEDED":
        return JobState(Phase.SUCCEEDED, "succeeded")
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        return ended(status)
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


def ended(status: Mapping[str, Any]) -> JobState:
    """A RayJob that KubeRay has given up, or whose driver failed or was stopped."""
    reason, message = status.get("reason", ""), status.get("message", "")
    if status.get("jobStatus") == "STOPPED" and not reason:
        return JobState(Phase.FAILED, "stopped", fatal="the driver was stopped from outside, as by `ray job stop`")
    told, retryable = ENDINGS.get(reason, (f"the RayJob failed: {reason or 'no reason given'}", True))
    end = end_of_driver(message)
    if end is not None:
        code, words = end
        message, retryable = f"exit code {code}\n{words}".rstrip(), retryable and code != PERMANENT_FAILURE
    return JobState(Phase.FAILED, "failed", fatal=f"{told}: {message}" if message else told, retryable=retryable)


def queued(job: Object) -> str:
    """What a suspended job waits for."""
    queue = labels_of(job).get(QUEUE)
    return f"queued: waits for room in Kueue's queue {queue}" if queue else "suspended: waits until it is resumed"


def wanted_pods(job: Object) -> int:
    """Pods of the whole Ray cluster at its start, the head included."""
    spec = job["spec"].get("rayClusterSpec", {})
    return 1 + sum(int(group.get("replicas", 1)) for group in spec.get("workerGroupSpecs", ()))


def waits_for(pod: Object, events: Sequence[Object]) -> Wait | None:
    """Why a pod does not run, None if it does or has ended."""
    if pod["status"].get("phase") != "Pending":
        return None
    conditions = {condition["type"]: condition for condition in pod["status"].get("conditions", ())}
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return no_node(pod, scheduled, events)
    since = seconds(pod["status"].get("startTime") or pod["metadata"]["creationTimestamp"])
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting is not None and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return no_start(pod, container, waiting, since)
    warnings = [event for event in events if about(event, pod) and event.get("type") == "Warning"]
    if warnings:
        return Wait(f"{warnings[-1].get('reason')}: {warnings[-1].get('message', '')}", since)
    return Wait("its containers are made", since) if scheduled is not None else Wait("not seen by the scheduler", since)


def containers(pod: Object) -> Iterator[Mapping[str, Any]]:
    """States of all containers of a pod, in the order in which they start."""
    yield from pod["status"].get("initContainerStatuses") or ()
    yield from pod["status"].get("containerStatuses") or ()


def no_start(pod: Object, container: Mapping[str, Any], waiting: Mapping[str, Any], since: float) -> Wait:
    """A container that cannot start: image, secret, or command."""
    reason, message = waiting["reason"], waiting.get("message", "")
    text, fatal, grace_s = f"{reason}: {message}" if message else reason, None, GRACE_S
    if reason in IMAGE_REASONS:
        fix = "Mend kubernetes.image or kubernetes.image_pull_secrets, or push the image."
        fatal = f"pod {name_of(pod)} cannot get its image {container.get('image')}: {text}. {fix}"
    elif reason in CONFIG_REASONS:
        fix = "Make the secret or the key, or mend kubernetes.store_secret or kubernetes.secrets."
        fatal, grace_s = f"pod {name_of(pod)} cannot start: {text}. {fix}", CONFIG_GRACE_S
    return Wait(text, since, fatal, grace_s)


def no_node(pod: Object, scheduled: Mapping[str, Any], events: Sequence[Object]) -> Wait:
    """A pod without a node: it is waited for where one is being made, or where one that fits is only taken."""
    message = scheduled.get("message") or scheduled.get("reason", "")
    scaling = any(event.get("reason") in SCALING and about(event, pod) for event in events)
    fatal = None
    if not scaling and fits_no_node(message):
        fatal = f"no node can hold pod {name_of(pod)}, which asks for {wishes(pod)}: {message.rstrip('. ')}. {NO_PLACE}"
    text = f"{scheduled.get('reason', 'Unschedulable')}: {message}" + ("; a node is being added" if scaling else "")
    return Wait(text, seconds(scheduled.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"]), fatal)


def fits_no_node(message: str) -> bool:
    """Whether the scheduler says that no node could hold a pod, even if all other pods were gone.

    It sorts nodes into those where preemption might help and those where it cannot.
    """
    if "no nodes available" in message:
        return True
    total = re.search(r"0/(\d+) nodes are available", message)
    if total is None or any(sign in message for sign in FOR_A_WHILE):
        return False
    _, preemption, after = message.partition("preemption:")
    if not preemption:
        return "Insufficient" not in message
    hopeless = re.search(r"(\d+) Preemption is not helpful", after)
    return hopeless is not None and hopeless[1] == total[1]


def wishes(pod: Object) -> str:
    """What a pod asks of a node: its selector, and what it requests."""
    requests: dict[str, str] = {}
    for container in pod["spec"].get("containers", ()):
        requests |= container.get("resources", {}).get("requests") or {}
    asked = {**(pod["spec"].get("nodeSelector") or {}), **requests}
    return ", ".join(f"{name}={value}" for name, value in asked.items()) or "nothing in particular"


def refused(job: Object, status: Mapping[str, Any], events: Sequence[Object], now: float) -> str | None:
    """Why the API server takes no pod of the cluster: quota, pod security, a missing account or priority class."""
    conditions = (status.get("rayClusterStatus") or {}).get("conditions") or ()
    for condition in conditions:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            old = now - seconds(condition["lastTransitionTime"])
            return explain_refusal(condition["message"]) if old >= GRACE_S / 3 else None
    ours, made = (name_of(job), status.get("rayClusterName")), seconds(job["metadata"]["creationTimestamp"])
    for event in events:
        failed = str(event.get("reason", "")).startswith("FailedToCreate")
        if seconds(event.get("lastTimestamp") or job["metadata"]["creationTimestamp"]) < made:
            continue  # of an earlier RayJob of this name
        if failed and event.get("involvedObject", {}).get("name") in ours and event.get("count", 1) > 1:
            return explain_refusal(event.get("message", ""))
    return None


def explain_refusal(message: str) -> str:
    """A refusal in the API server's words, and what to do."""
    fixes = {
        "exceeded quota": "Wait until others have ended, ask for less, or raise the quota of the namespace.",
        "violates PodSecurity": "The namespace asks for more than these pods keep to; see docs/kubernetes.md.",
        "serviceaccount": "Make the account, or mend kubernetes.service_account.",
        "PriorityClass": "Make the class, or mend kubernetes.trainer_priority_class or rollout_priority_class.",
    }
    fix = next((fix for sign, fix in fixes.items() if sign in message), "")
    cause = message.rpartition("is forbidden: ")[2]
    return f"the cluster refuses the pods of the run: {cause.rstrip('. ')}. {fix}".rstrip()


def head_lost(status: Mapping[str, Any], pods: Sequence[Object], now: float) -> str | None:
    """Why a running job has lost its head, None if it has not. KubeRay makes a new head, which knows of no job.

    A head that is younger than the pod which handed the job over is another one. Both ages are the API server's; when
    the job began is known from Ray alone, by the clock of the head's node.
    """
    began = (status.get("rayJobInfo") or {}).get("startTime")
    if began is None:
        return None
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    handed_over = [pod["metadata"]["creationTimestamp"] for pod in alive if NODE_TYPE not in labels_of(pod)]
    living = [pod for pod in alive if labels_of(pod).get(NODE_TYPE) == "head"]
    if not living:
        return "the head pod is gone"
    head = living[0]
    if seconds(head["metadata"]["creationTimestamp"]) > seconds(max(handed_over, default=began)):
        return "the head pod was replaced"
    if head["status"].get("phase") in ("Failed", "Succeeded"):
        return f"the head pod ended: {head['status'].get('reason') or last_end(head) or 'no reason given'}"
    for container in containers(head):
        last = container.get("lastState", {}).get("terminated")
        if last is not None and seconds(last.get("finishedAt")) > seconds(began):
            return f"the head's container {container['name']} ended and was started again: {last.get('reason')}"
    ready = next((c for c in head["status"].get("conditions", ()) if c["type"] == "Ready"), None)
    if ready is not None and ready["status"] != "True" and now - seconds(ready["lastTransitionTime"]) > HEAD_GRACE_S:
        return f"the head pod has not been ready for {HEAD_GRACE_S:.0f} s: {ready.get('reason', '')}"
    return None


def last_end(pod: Object) -> str | None:
    """Why a container of a pod ended, such as OOMKilled."""
    ends = (container.get("state", {}).get("terminated") for container in containers(pod))
    return next((str(end.get("reason")) for end in ends if end is not None), None)


def is_ready(pod: Object) -> bool:
    """Whether a pod of the Ray cluster answers its probes."""
    if NODE_TYPE not in labels_of(pod):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def about(event: Object, thing: Object) -> bool:
    """Whether an event is of an object."""
    return bool(event.get("involvedObject", {}).get("name") == name_of(thing))


def seconds(time: str | None) -> float:
    """A time of Kubernetes in seconds since 1970; 0 for none."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0
