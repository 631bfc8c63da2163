"""GPU hours of a run over all its attempts: GPUs of its pods times the time that the pods held them. And its time: that
in which it had any pod.

A pod holds its GPUs from the moment it is scheduled until it has ended. The usage of every pod is kept in the store, so
that a restarted watcher continues the count. A pod that disappeared while no watcher ran is counted until its job
ended, or until the pod was last seen if that is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace

from tidemill.errors import StoreError
from tidemill.kuberay.cluster import Object, condition_of, seconds
from tidemill.store.object_store import ObjectStore

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class PodUsage:
    """The GPUs of a pod, which may be none, and from when until when it held them, in seconds since 1970."""

    gpus: int
    start: float
    end: float


@dataclass(slots=True)
class GpuUsage:
    """What the pods of a run used, by their uid."""

    pods: dict[str, PodUsage] = field(default_factory=dict)

    def update(self, pods: Sequence[Object], gpu: str | None, now: float, job_ended: float | None = None) -> None:
        """Count the usage of the pods until now.

        Args:
            pods: pods of the run.
            gpu: the GPU resource, such as `nvidia.com/gpu`; None counts no GPUs.
            now: seconds since 1970.
            job_ended: when the job ended; None while it runs, or if that is unknown.
        """
        if job_ended is not None:
            self.extend_missing({pod["metadata"]["uid"] for pod in pods}, min(job_ended, now))
        for pod in pods:
            start = scheduled(pod)
            if start is not None:
                self.pods[pod["metadata"]["uid"]] = PodUsage(gpus_of(pod, gpu), start, max(start, ended(pod) or now))

    def extend_missing(self, present: Collection[str], end: float) -> None:
        """Count pods that were alive at the last update and have disappeared since until the end of their job."""
        last = max((usage.end for usage in self.pods.values()), default=end)
        for uid, usage in self.pods.items():
            if usage.end == last < end and uid not in present:
                self.pods[uid] = replace(usage, end=end)

    @property
    def hours(self) -> float:
        return sum(usage.gpus * (usage.end - usage.start) for usage in self.pods.values()) / HOUR_S

    @property
    def seconds(self) -> float:
        """Time in which the run had a pod; attempts add up, and the pauses between them do not count."""
        total, counted = 0.0, 0.0
        for usage in sorted(self.pods.values(), key=lambda usage: usage.start):
            total += max(0.0, usage.end - max(usage.start, counted))
            counted = max(counted, usage.end)
        return total

    def save(self, store: ObjectStore, run: str) -> None:
        text = json.dumps({uid: asdict(usage) for uid, usage in self.pods.items()})
        store.put_bytes(usage_key(run), text.encode())

    @classmethod
    def load(cls, store: ObjectStore, run: str) -> GpuUsage:
        """The usage of a run as it was last saved; empty for a new run.

        Raises:
            StoreError: the object holds something else, or the store cannot be reached.
        """
        key = usage_key(run)
        if not store.exists(key):
            return cls()
        text = store.get_bytes(key).decode(errors="replace")
        try:
            return cls({uid: PodUsage(**usage) for uid, usage in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{store.uri(key)}: not a count of GPU hours: {error}. Delete it to restart the count at zero."
            ) from error


def usage_key(run: str) -> str:
    return f"runs/{run}/gpu-hours.json"


def held_gpus(pods: Sequence[Object], gpu: str | None) -> int:
    return sum(gpus_of(pod, gpu) for pod in pods if scheduled(pod) is not None and ended(pod) is None)


def gpus_of(pod: Object, gpu: str | None) -> int:
    if gpu is None:
        return 0
    resources = [container.get("resources") or {} for container in pod["spec"].get("containers", ())]
    return sum(int((found.get("limits") or {}).get(gpu, 0)) for found in resources)


def scheduled(pod: Object) -> float | None:
    """When a pod was assigned to a node, None before that."""
    condition = condition_of(pod, "PodScheduled")
    return seconds(condition["lastTransitionTime"]) if condition and condition["status"] == "True" else None


def ended(pod: Object) -> float | None:
    """When the last container of a pod ended, None while the pod is alive."""
    if pod["status"].get("phase") not in ("Succeeded", "Failed"):
        return None
    ends = [container.get("state", {}).get("terminated") for container in pod["status"].get("containerStatuses", ())]
    return max((seconds(end.get("finishedAt")) for end in ends if end is not None), default=None) or scheduled(pod)
