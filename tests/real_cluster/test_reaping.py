"""The deletion of abandoned runs on a real cluster."""

from __future__ import annotations

import time

import pytest
from cluster_rig import ClusterRun

from tidemill.config.names import HEARTBEAT
from tidemill.errors import ClusterError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import CONFIG_MAPS, RAY_JOBS
from tidemill.kuberay.reap import reap
from tidemill.kuberay.run_status import Owner, owner_reference

pytestmark = pytest.mark.cluster


def test_only_a_cluster_without_a_heartbeat_is_reaped(run: ClusterRun, reaper: KubernetesCluster) -> None:
    run.trainer_steps = 500
    run.provision()
    run.until(lambda: len(run.pods()) >= 3)
    assert run.job() not in [job.name for job in reap(reaper, 1800, time.time())]
    silent = {"metadata": {"annotations": {HEARTBEAT: f"{time.time() - 3600:.0f}"}}}
    run.admin.patch(RAY_JOBS, run.job(), silent)
    assert run.job() in [job.name for job in reap(reaper, 1800, time.time(), dry_run=True)]
    assert run.pods() != []
    found = {job.name: job.reason for job in reap(reaper, 1800, time.time())}
    assert found[run.job()] == "its watcher has written no heartbeat for 60 min"
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
