"""The calls that a run makes to the API server of a Kubernetes cluster, as one protocol over objects in JSON.

`client.KubernetesCluster` talks to a real API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object."""

    group: str  # API group, "" for the core group
    version: str  # API version
    plural: str  # name of the kind in URLs and in permissions
    namespaced: bool = True  # whether objects of this kind belong to a namespace
    provided_by: str = "Kubernetes"  # the software that installs the kind, for the error when it is missing

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if self.namespaced else f"{root}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


RAY_JOBS = Kind("ray.io", "v1", "rayjobs", provided_by="the KubeRay operator")
RAY_CLUSTERS = Kind("ray.io", "v1", "rayclusters", provided_by="the KubeRay operator")
PODS = Kind("", "v1", "pods")
EVENTS = Kind("", "v1", "events")
NODES = Kind("", "v1", "nodes", namespaced=False)
SECRETS = Kind("", "v1", "secrets")
CONFIG_MAPS = Kind("", "v1", "configmaps")
WORKFLOWS = Kind("argoproj.io", "v1alpha1", "workflows", provided_by="Argo Workflows")


class Cluster(Protocol):
    """One namespace of a Kubernetes cluster.

    Every call has a deadline and is repeated while the API server is briefly busy or unreachable. Every call raises
    ClusterError if the server refuses it or does not know the kind, and RunError if the server fails or cannot be
    reached.
    """

    namespace: str

    def create(self, kind: Kind, manifest: Object) -> Object:
        """Create an object. If the name is taken, return the existing object unchanged. Unknown fields are an error."""
        ...

    def dry_run_create(self, kind: Kind, manifest: Object) -> None:
        """Let the API server validate and admit an object without storing it. Unknown fields are an error."""
        ...

    def get(self, kind: Kind, name: str) -> Object | None:
        """An object, None if it does not exist."""
        ...

    def list(self, kind: Kind, selector: str = "") -> Sequence[Object]:
        """Objects that match a label selector."""
        ...

    def patch(self, kind: Kind, name: str, change: Object) -> None:
        """Apply a JSON merge patch to an object; does nothing if the object does not exist."""
        ...

    def delete(self, kind: Kind, name: str) -> None:
        """Start the foreground deletion of an object: it disappears after everything that it owns. Returns at once and
        does nothing if the object does not exist.
        """
        ...

    def log(self, pod: str, container: str | None = None, lines: int = 100) -> str:
        """The last lines of a container's log; "" if there is no such pod or the container has not started."""
        ...

    def follow(self, pod: str, container: str | None = None) -> Iterator[str]:
        """The whole log of a container, line by line, until the container ends."""
        ...

    def is_allowed(self, verb: str, kind: Kind) -> bool:
        """Whether this client has a permission in the namespace."""
        ...


def labels_of(obj: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return found


def annotations_of(obj: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return found


def name_of(obj: Object) -> str:
    name: str = obj["metadata"]["name"]
    return name


def condition_of(obj: Object, kind: str) -> Mapping[str, str] | None:
    """The condition of a type in the status of an object, None without one."""
    return next((found for found in obj["status"].get("conditions") or () if found["type"] == kind), None)


def seconds(time: str | None) -> float:
    """A Kubernetes timestamp in seconds since 1970; 0 for None."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0
