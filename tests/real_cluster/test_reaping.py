"""The deletion of abandoned runs on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_rig import NAMESPACES, ClusterRun

from tidemill.config.names import HEARTBEAT
from tidemill.errors import ClusterError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import CONFIG_MAPS, RAY_JOBS, WORKFLOWS, Kind
from tidemill.kuberay.reap import reap
from tidemill.kuberay.run_status import Owner, owner_reference

pytestmark = pytest.mark.cluster

ACCESS = Path(__file__).parents[2] / "k8s/components/kubeflow/access.yaml"
RBAC = "rbac.authorization.k8s.io"
KINDS = {"Role": Kind(RBAC, "v1", "roles"), "RoleBinding": Kind(RBAC, "v1", "rolebindings")}
DEFINITIONS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)


@pytest.fixture
def kfp(admin: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """The namespace of KFP with the role of the reaper there, and a stub of Argo's kind of workflow."""
    space = KubernetesCluster(f"{admin.namespace}-kfp", admin.client)
    space.create(NAMESPACES, {"metadata": {"name": space.namespace}})
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": WORKFLOWS.plural, "kind": "Workflow"}
    spec = {"group": WORKFLOWS.group, "names": names, "scope": "Namespaced", "versions": [version]}
    space.create(DEFINITIONS, {"metadata": {"name": str(WORKFLOWS)}, "spec": spec})
    text = ACCESS.read_text(encoding="utf-8").replace("namespace: tidemill", f"namespace: {admin.namespace}")
    for document in yaml.safe_load_all(text.replace("namespace: kubeflow", f"namespace: {space.namespace}")):
        if document["metadata"]["name"] == "tidemill-reaper":
            space.create(KINDS[document["kind"]], document)
    yield space
    space.delete(DEFINITIONS, str(WORKFLOWS))
    space.delete(NAMESPACES, space.namespace)


def reaped(reaper: KubernetesCluster, *, dry_run: bool = False) -> dict[str, str]:
    """Names and reasons."""

    def connect(namespace: str) -> KubernetesCluster:
        return KubernetesCluster(namespace, reaper.client)

    return {job.name: job.reason for job in reap(reaper, 1800, time.time(), connect, dry_run=dry_run)}


def test_only_a_cluster_without_a_heartbeat_is_reaped(run: ClusterRun, reaper: KubernetesCluster) -> None:
    run.trainer_steps = 500
    run.provision()
    run.until(lambda: len(run.pods()) >= 3)
    assert run.job() not in reaped(reaper)
    silent = {"metadata": {"annotations": {HEARTBEAT: f"{time.time() - 3600:.0f}"}}}
    run.admin.patch(RAY_JOBS, run.job(), silent)
    assert run.job() in reaped(reaper, dry_run=True)
    assert run.pods() != []
    assert reaped(reaper)[run.job()] == "its watcher has written no heartbeat for 60 min"
    run.until(lambda: not run.left())


def test_a_cluster_is_deleted_with_its_owner(run: ClusterRun) -> None:
    """The owner is a ConfigMap instead of a workflow, because the test bed has no Argo."""
    name = f"owner-{run.name}"
    owner = run.admin.create(CONFIG_MAPS, {"metadata": {"name": name}})
    uid = owner["metadata"]["uid"]
    run.owner = Owner(None, owner_reference(name, uid, kind="ConfigMap", api_version="v1"))
    run.trainer_steps = 500
    run.provision()
    with run.followed() as watched:
        run.until(lambda: len(run.pods()) >= 3)
        run.admin.delete(CONFIG_MAPS, name)
        with pytest.raises(ClusterError, match="was deleted from outside"):
            watched.result(480)
    assert run.left() == []


def test_a_cluster_is_reaped_when_the_workflow_of_its_pipeline_is_gone(
    run: ClusterRun, reaper: KubernetesCluster, kfp: KubernetesCluster
) -> None:
    """As after the deletion of a schedule in KFP: nothing tells the run, and its watcher goes on writing heartbeats."""
    manifest = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "flow"}}
    run.until(lambda: kfp.is_allowed("get", WORKFLOWS) and kfp.create(WORKFLOWS, manifest))
    run.owner = Owner("kfp-1", workflow=f"{kfp.namespace}/flow")
    run.trainer_steps = 500
    run.provision()
    run.until(lambda: len(run.pods()) >= 3)
    assert run.job() not in reaped(reaper)
    kfp.delete(WORKFLOWS, "flow")
    run.until(lambda: kfp.get(WORKFLOWS, "flow") is None)
    begun = time.monotonic()
    assert reaped(reaper)[run.job()] == f"its workflow flow in namespace {kfp.namespace} is gone"
    run.until(lambda: not run.left())
    assert time.monotonic() - begun < 180
