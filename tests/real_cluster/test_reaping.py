"""What takes a run's cluster away on a real cluster when nobody is left to do it."""

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


def test_a_cluster_whose_watcher_is_silent_is_reaped_and_one_that_is_watched_is_not(
    run: ClusterRun, reaper: KubernetesCluster
) -> None:
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


def test_a_cluster_goes_with_its_owner_and_its_watcher_says_so(run: ClusterRun) -> None:
    """The owner is a ConfigMap in place of a workflow, which the test bed does not know; garbage is collected alike."""
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
