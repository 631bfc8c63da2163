"""A Kubernetes cluster with the KubeRay operator for tests, in one process and without waiting.

`FakeCluster` stores objects as an API server does; `FakeOperator` does to RayJobs what KubeRay and the kubelet do.
Every call is one event, so a test decides what happens and when.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import EVENTS, PODS, RAY_CLUSTERS, RAY_JOBS, Kind, Object, labels_of

Manifest = dict[str, Any]


@dataclass(slots=True)
class FakeClock:
    """Time that passes only during `sleep`, and events at planned times; implements `attempts.Clock`."""

    now: float = 1_800_000_000.0
    planned: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.planned and self.planned[0][0] <= end:
            self.now, _, happen = heapq.heappop(self.planned)
            happen()
        self.now = end

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Plan an event."""
        heapq.heappush(self.planned, (self.now + seconds, next(self.numbers), happen))

    def stamp(self) -> str:
        """The time in the notation of Kubernetes."""
        return datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeCluster:
    """Implements `cluster.Cluster`.

    Args:
        clock: of creation timestamps.
        namespace: of all objects.
        missing: kinds that the cluster does not know.
        forbidden: pairs of verb and kind that the client has no permission for.
    """

    def __init__(
        self,
        clock: FakeClock,
        namespace: str = "tidemill",
        *,
        missing: Collection[Kind] = (),
        forbidden: Collection[tuple[str, Kind]] = (),
    ) -> None:
        self.clock, self.namespace = clock, namespace
        self.missing, self.forbidden = missing, forbidden
        self.away = False
        self.objects: dict[tuple[Kind, str], Manifest] = {}
        self.logs: dict[str, str] = {}
        self.created: list[str] = []
        self.uids = itertools.count(1)

    def create(self, kind: Kind, manifest: Object) -> Object:
        self.admit("create", kind)
        name = manifest["metadata"]["name"]
        if (kind, name) not in self.objects:
            obj: Manifest = copy.deepcopy(dict(manifest))
            obj["metadata"] |= {"uid": f"uid-{next(self.uids)}", "creationTimestamp": self.clock.stamp()}
            self.objects[kind, name] = obj
            self.created.append(name)
        return copy.deepcopy(self.objects[kind, name])

    def get(self, kind: Kind, name: str) -> Object | None:
        self.admit("get", kind)
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: Kind, selector: str = "") -> list[Object]:
        self.admit("list", kind)
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        return [
            copy.deepcopy(obj)
            for (of, _), obj in self.objects.items()
            if of == kind and wanted.items() <= labels_of(obj).items()
        ]

    def patch(self, kind: Kind, name: str, change: Object) -> None:
        self.admit("patch", kind)
        if (kind, name) in self.objects:
            merge(self.objects[kind, name], change)

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object and what it owns at once; an object with a finalizer only gets a deletion timestamp."""
        self.admit("delete", kind)
        obj = self.objects.get((kind, name))
        if obj is None:
            return
        if obj["metadata"].get("finalizers"):
            obj["metadata"]["deletionTimestamp"] = self.clock.stamp()
            return
        del self.objects[kind, name]
        uid = obj["metadata"]["uid"]
        for (of, other), owned in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in owned["metadata"].get("ownerReferences") or ()):
                self.delete(of, other)

    def log(self, pod: str, container: str | None = None, lines: int = 100) -> str:
        self.admit("get", PODS)
        return "\n".join(self.logs.get(pod, "").splitlines()[-lines:])

    def follow(self, pod: str, container: str | None = None) -> Iterator[str]:
        self.admit("get", PODS)
        yield from self.logs.get(pod, "").splitlines()

    def dry_run_create(self, kind: Kind, manifest: Object) -> None:
        self.admit("create", kind)

    def is_allowed(self, verb: str, kind: Kind) -> bool:
        self.answer()
        return (verb, kind) not in self.forbidden

    def admit(self, verb: str, kind: Kind) -> None:
        self.answer()
        if kind in self.missing:
            raise ClusterError(f"the cluster knows no {kind}: install {kind.provided_by}")
        if (verb, kind) in self.forbidden:
            raise ClusterError(f"no permission to {verb} {kind} in namespace {self.namespace}")

    def answer(self) -> None:
        if self.away:
            raise RunError("the Kubernetes API server at https://fake does not answer: connection refused")


def merge(obj: Manifest, change: Mapping[str, Any]) -> None:
    """JSON merge patch (RFC 7386)."""
    for key, value in change.items():
        if value is None:
            obj.pop(key, None)
        elif isinstance(value, Mapping):
            inner = obj.get(key)
            obj[key] = inner if isinstance(inner, dict) else {}
            merge(obj[key], value)
        else:
            obj[key] = copy.deepcopy(value)


class FakeOperator:
    """KubeRay, scheduler and kubelet: every method is one event."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.clock = cluster, cluster.clock

    def job(self, name: str) -> Manifest:
        """A RayJob that can be changed in place."""
        return self.cluster.objects[RAY_JOBS, name]

    def pod(self, name: str) -> Manifest:
        """A pod that can be changed in place."""
        return self.cluster.objects[PODS, name]

    def admit(self, name: str) -> None:
        """Create the RayCluster of a RayJob and its pods, which have no node yet."""
        job, cluster = self.job(name), f"{name}-cluster"
        job["status"] = {
            "jobDeploymentStatus": "Initializing",
            "jobStatus": "",
            "rayClusterName": cluster,
            "startTime": self.clock.stamp(),
        }
        self.own(RAY_CLUSTERS, cluster, job, {"metadata": {"labels": dict(labels_of(job))}, "spec": {}})
        spec = job["spec"]["rayClusterSpec"]
        self.make_pod(f"{cluster}-head", "head", cluster, spec["headGroupSpec"]["template"])
        for group in spec["workerGroupSpecs"]:
            for index in range(group["replicas"]):
                self.make_pod(f"{cluster}-{group['groupName']}-{index}", "worker", cluster, group["template"])

    def make_pod(self, name: str, node_type: str, cluster: str, template: Mapping[str, Any]) -> None:
        """Create a pending pod of a Ray cluster."""
        marks = {"ray.io/node-type": node_type, "ray.io/cluster": cluster}
        pod = {
            "metadata": {"labels": {**template["metadata"]["labels"], **marks}},
            "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": [self.condition("PodScheduled", "False", "not seen yet")]},
        }
        self.own(PODS, name, self.cluster.objects[RAY_CLUSTERS, cluster], pod)

    def own(self, kind: Kind, name: str, owner: Manifest, obj: Manifest) -> None:
        """Create an object that another one owns."""
        reference = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        obj["metadata"] |= {"name": name, "ownerReferences": [reference]}
        self.cluster.create(kind, obj)

    def condition(self, kind: str, status: str, message: str = "", reason: str = "") -> Manifest:
        """A condition whose last transition is now."""
        stamp = self.clock.stamp()
        return {"type": kind, "status": status, "message": message, "reason": reason, "lastTransitionTime": stamp}

    def unschedulable(self, pod: str, message: str) -> None:
        """The scheduler finds no node for a pod."""
        refused = self.condition("PodScheduled", "False", message, "Unschedulable")
        self.pod(pod)["status"]["conditions"] = [refused]

    def waiting(self, pod: str, reason: str, message: str) -> None:
        """The container of a pod waits."""
        state = {"name": "ray", "image": "i", "state": {"waiting": {"reason": reason, "message": message}}}
        conditions = [self.condition("PodScheduled", "True")]
        self.pod(pod)["status"] |= {"startTime": self.clock.stamp(), "conditions": conditions}
        self.pod(pod)["status"]["containerStatuses"] = [state]

    def ready(self, pod: str) -> None:
        """A pod runs and is ready."""
        conditions = [self.condition("PodScheduled", "True"), self.condition("Ready", "True")]
        running = {"name": "ray", "state": {"running": {"startedAt": self.clock.stamp()}}}
        self.pod(pod)["status"] = {"phase": "Running", "conditions": conditions, "containerStatuses": [running]}

    def run(self, name: str) -> None:
        """All pods of a RayJob are ready and its driver runs."""
        cluster = self.job(name)["status"]["rayClusterName"]
        for pod in self.cluster.list(PODS, f"ray.io/cluster={cluster}"):
            self.ready(pod["metadata"]["name"])
        started = {"rayJobInfo": {"startTime": self.clock.stamp()}}
        self.job(name)["status"] |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", **started}

    def succeed(self, name: str) -> None:
        """The driver succeeds."""
        ended = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "endTime": self.clock.stamp()}
        self.job(name)["status"] |= ended

    def fail(self, name: str, reason: str = "AppFailed", message: str = "exit code 1") -> None:
        """The RayJob fails."""
        ended = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": reason, "message": message}
        self.job(name)["status"] |= ended

    def lose_head(self, name: str) -> None:
        """The head pod is deleted."""
        cluster = self.job(name)["status"]["rayClusterName"]
        self.cluster.delete(PODS, f"{cluster}-head")

    def refuse_pods(self, name: str, message: str) -> None:
        """The API server refuses the pods of the RayCluster."""
        refusal = self.condition("ReplicaFailure", "True", message, "FailedCreateHeadPod")
        self.job(name)["status"]["rayClusterStatus"] = {"conditions": [refusal]}
        cluster = self.job(name)["status"]["rayClusterName"]
        for pod in self.cluster.list(PODS, f"ray.io/cluster={cluster}"):
            self.cluster.delete(PODS, pod["metadata"]["name"])

    def event(self, about: str, reason: str, message: str, kind: str = "Normal") -> None:
        """Create an event about an object."""
        event = {
            "metadata": {"name": f"{about}.{next(self.cluster.uids)}"},
            "involvedObject": {"name": about},
            "reason": reason,
            "message": message,
            "type": kind,
        }
        self.cluster.create(EVENTS, event)
