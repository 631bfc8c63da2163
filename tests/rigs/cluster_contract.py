"""The contract of `Cluster`: tested with the fake, and in tests/real_cluster with a real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidemill.errors import ClusterError
from tidemill.kuberay.cluster import CONFIG_MAPS, PODS, RAY_JOBS, WORKFLOWS, Cluster, Kind, name_of
from tidemill.retry import wait_for

NOTHING = Kind("tidemill.dev", "v1", "nothings", provided_by="nobody")
WAIT_S = 120.0


def suspended(name: str) -> dict[str, Any]:
    """A RayJob without pods."""
    container = {"name": "ray", "image": "i:1"}
    head = {"rayStartParams": {}, "template": {"spec": {"containers": [container]}}}
    spec = {
        "entrypoint": "true",
        "suspend": True,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {"headGroupSpec": head},
    }
    metadata = {"name": name, "labels": {"run": name}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def notes(name: str, **metadata: object) -> dict[str, object]:
    """A ConfigMap."""
    return {"metadata": {"name": name, **metadata}, "data": {"a": "1", "b": "2"}}


def eventually(holds: Callable[[], bool]) -> None:
    """Wait: deletion in the foreground takes time."""
    assert wait_for(holds, WAIT_S, 0.1)


class ClusterContract:
    """Tests of a fixture `cluster`, which subclasses define."""

    def test_a_second_creation_attaches_to_the_first(self, cluster: Cluster) -> None:
        first = cluster.create(RAY_JOBS, suspended("twice"))
        second = cluster.create(RAY_JOBS, suspended("twice") | {"spec": {"entrypoint": "false"}})
        assert second["metadata"]["uid"] == first["metadata"]["uid"]
        assert second["spec"]["entrypoint"] == "true"

    def test_a_missing_object_is_none(self, cluster: Cluster) -> None:
        assert cluster.get(RAY_JOBS, "no-such-job") is None

    def test_objects_are_selected_by_label(self, cluster: Cluster) -> None:
        for name in ("one", "two"):
            cluster.create(RAY_JOBS, suspended(name))
        assert [name_of(job) for job in cluster.list(RAY_JOBS, "run=two")] == ["two"]
        assert {"one", "two"} <= {name_of(job) for job in cluster.list(RAY_JOBS)}

    def test_a_patch_changes_adds_and_removes(self, cluster: Cluster) -> None:
        cluster.create(CONFIG_MAPS, notes("patched"))
        cluster.patch(CONFIG_MAPS, "patched", {"data": {"a": "3", "b": None, "c": "4"}})
        found = cluster.get(CONFIG_MAPS, "patched")
        assert found is not None
        assert found["data"] == {"a": "3", "c": "4"}

    def test_a_patch_or_deletion_of_a_missing_object_does_nothing(self, cluster: Cluster) -> None:
        cluster.patch(CONFIG_MAPS, "no-such-map", {"data": {}})
        cluster.delete(CONFIG_MAPS, "no-such-map")
        assert cluster.get(CONFIG_MAPS, "no-such-map") is None

    def test_owned_objects_are_deleted_with_their_owner(self, cluster: Cluster) -> None:
        owner = cluster.create(CONFIG_MAPS, notes("owner"))
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
        cluster.create(CONFIG_MAPS, notes("owned", ownerReferences=[reference]))
        cluster.delete(CONFIG_MAPS, "owner")
        eventually(lambda: cluster.get(CONFIG_MAPS, "owned") is None and cluster.get(CONFIG_MAPS, "owner") is None)

    @pytest.mark.parametrize("kind", [WORKFLOWS, NOTHING])
    def test_a_missing_kind_is_named_with_its_provider(self, cluster: Cluster, kind: Kind) -> None:
        for ask in (lambda: cluster.list(kind), lambda: cluster.get(kind, "x")):
            with pytest.raises(ClusterError, match=f"knows no {kind}: install {kind.provided_by}"):
                ask()

    def test_the_log_of_a_missing_pod_is_empty(self, cluster: Cluster) -> None:
        assert cluster.log("no-such-pod") == ""

    def test_permissions_are_known(self, cluster: Cluster) -> None:
        assert cluster.is_allowed("list", PODS)
