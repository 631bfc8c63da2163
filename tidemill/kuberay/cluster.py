"""What a run asks of a Kubernetes cluster, as one narrow protocol over the objects that the API server sends.

`client.KubernetesCluster` talks to a real one, `fake.FakeCluster` stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Object = Mapping[str, Any]
"""An object of Kubernetes as JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object.

    Attributes:
        group: API group, "" for the core.
        version: of the API.
        plural: its name in addresses and in permissions.
        namespaced: whether its objects live in a namespace.
        belongs_to: who brings the kind to a cluster, for a message where it is missing.
    """

    group: str
    version: str
    plural: str
    namespaced: bool = True
    belongs_to: str = "Kubernetes"

    def path(self, namespace: str) -> str:
        """Address of all objects of the kind."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if self.namespaced else f"{root}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


RAY_JOBS = Kind("ray.io", "v1", "rayjobs", belongs_to="the KubeRay operator")
RAY_CLUSTERS = Kind("ray.io", "v1", "rayclusters", belongs_to="the KubeRay operator")
PODS = Kind("", "v1", "pods")
EVENTS = Kind("", "v1", "events")
NODES = Kind("", "v1", "nodes", namespaced=False)
SECRETS = Kind("", "v1", "secrets")
CONFIG_MAPS = Kind("", "v1", "configmaps")
WORKFLOWS = Kind("argoproj.io", "v1alpha1", "workflows", belongs_to="Argo Workflows")


class Cluster(Protocol):
    """One namespace of a Kubernetes cluster.

    Every call has a deadline and is tried again where the API server is busy or away for a moment. All raise
    ClusterError where it refuses us or does not know the kind, and RunError where it cannot be reached or fails.
    """

    namespace: str

    def create(self, kind: Kind, manifest: Object) -> Object:
        """Make an object; where its name is taken, the object that has it is returned as it is."""
        ...

    def get(self, kind: Kind, name: str) -> Object | None:
        """An object, None where there is none of this name."""
        ...

    def list(self, kind: Kind, selector: str = "") -> Sequence[Object]:
        """The objects that a label selector chooses."""
        ...

    def patch(self, kind: Kind, name: str, change: Object) -> None:
        """Merge a change into an object; one that is gone is left gone."""
        ...

    def delete(self, kind: Kind, name: str) -> None:
        """Delete an object once all that it owns is gone; returns at once. One that is gone is fine."""
        ...

    def log(self, pod: str, container: str | None = None, lines: int = 100) -> str:
        """The last lines that a container of a pod wrote; "" where there is no pod, or it has not started."""
        ...

    def follow(self, pod: str, container: str | None = None) -> Iterator[str]:
        """The whole log of a container, line by line, until it ends."""
        ...

    def rehearse(self, kind: Kind, manifest: Object) -> None:
        """Have the cluster check an object as if it were made; keys that it does not know are refused too."""
        ...

    def may(self, verb: str, kind: Kind) -> bool:
        """Whether we have a permission in the namespace."""
        ...


def labels_of(thing: Object) -> Mapping[str, str]:
    """Labels of an object."""
    found: Mapping[str, str] = thing["metadata"].get("labels") or {}
    return found


def annotations_of(thing: Object) -> Mapping[str, str]:
    """Annotations of an object."""
    found: Mapping[str, str] = thing["metadata"].get("annotations") or {}
    return found


def name_of(thing: Object) -> str:
    """Name of an object."""
    name: str = thing["metadata"]["name"]
    return name
