"""GPU hours of a run: what its pods held, for how long, over all attempts. Pure but for `load` and `save`.

A pod holds its GPUs from the moment it has a node until it has ended. What has been seen of every pod is kept in the
store, so that the count goes on when the watcher is started again. A pod that went away while nobody watched counts
until the job ended, if it did; else only until it was last seen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidemill.errors import StoreError
from tidemill.kuberay.cluster import Object
from tidemill.kuberay.state import seconds
from tidemill.store.object_store import ObjectStore

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Holding:
    """GPUs that a pod held.

    Attributes:
        gpus: how many.
        start, end: from when until when, in seconds since 1970.
    """

    gpus: int
    start: float
    end: float


@dataclass(slots=True)
class Meter:
    """GPU hours of a run, by the uid of its pods."""

    holdings: dict[str, Holding] = field(default_factory=dict)

    def see(self, pods: Sequence[Object], gpu: str | None, now: float, over: float | None = None) -> None:
        """Count what the pods hold until now.

        Args:
            pods: of the run.
            gpu: resource that a GPU is counted as, such as `nvidia.com/gpu`; None counts nothing.
            now: seconds since 1970.
            over: when their job ended; None while it goes on, or where nobody knows.
        """
        if over is not None:
            self.see_off({pod["metadata"]["uid"] for pod in pods}, min(over, now))
        for pod in pods:
            start, gpus = scheduled(pod), gpus_of(pod, gpu)
            if gpus and start is not None:
                self.holdings[pod["metadata"]["uid"]] = Holding(gpus, start, max(start, ended(pod) or now))

    def see_off(self, there: Collection[str], end: float) -> None:
        """Count pods that were alive at the last look, and are not there any more, until the end of their job."""
        last = max((held.end for held in self.holdings.values()), default=end)
        for uid, held in self.holdings.items():
            if held.end == last < end and uid not in there:
                self.holdings[uid] = replace(held, end=end)

    @property
    def hours(self) -> float:
        """GPUs times hours."""
        return sum(held.gpus * (held.end - held.start) for held in self.holdings.values()) / HOUR_S

    def to_json(self) -> str:
        """As it is kept in the store."""
        return json.dumps({uid: asdict(held) for uid, held in self.holdings.items()})

    @classmethod
    def from_json(cls, text: str) -> Meter:
        """Read what `to_json` made.

        Raises:
            StoreError: it is something else.
        """
        try:
            return cls({uid: Holding(**held) for uid, held in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"not a count of GPU hours: {error}") from error


def meter_key(run: str) -> str:
    """Where the count of a run lies in the store."""
    return f"runs/{run}/gpu-hours.json"


def load(store: ObjectStore, run: str) -> Meter:
    """The count as it was last saved; an empty one for a new run."""
    key = meter_key(run)
    if not store.exists(key):
        return Meter()
    text = store.get_bytes(key).decode(errors="replace")
    try:
        return Meter.from_json(text)
    except StoreError as error:
        raise StoreError(f"{store.uri(key)}: {error}. Delete it to count from nothing.") from error


def save(meter: Meter, store: ObjectStore, run: str) -> None:
    """Keep the count."""
    store.put_bytes(meter_key(run), meter.to_json().encode())


def holding(pods: Sequence[Object], gpu: str | None) -> int:
    """GPUs that pods hold now."""
    return sum(gpus_of(pod, gpu) for pod in pods if scheduled(pod) is not None and ended(pod) is None)


def gpus_of(pod: Object, gpu: str | None) -> int:
    """GPUs that a pod asks for."""
    if gpu is None:
        return 0
    return sum(int(resources(container).get(gpu, 0)) for container in pod["spec"].get("containers", ()))


def resources(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a container may use at most."""
    limits: Mapping[str, Any] = container.get("resources", {}).get("limits") or {}
    return limits


def scheduled(pod: Object) -> float | None:
    """When a pod got its node, None while it has none."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return seconds(condition["lastTransitionTime"])
    return None


def ended(pod: Object) -> float | None:
    """When the last container of a pod ended, None while the pod is alive."""
    if pod["status"].get("phase") not in ("Succeeded", "Failed"):
        return None
    ends = [container.get("state", {}).get("terminated") for container in pod["status"].get("containerStatuses", ())]
    return max((seconds(end.get("finishedAt")) for end in ends if end is not None), default=None) or scheduled(pod)
