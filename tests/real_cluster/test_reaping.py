"""What takes a run's cluster away on a real cluster when nobody is left to do it."""

from __future__ import annotations

import time

import pytest
from cluster_rig import Bench

from tidemill.config.names import HEARTBEAT
from tidemill.errors import ClusterError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import CONFIG_MAPS, RAY_JOBS
from tidemill.kuberay.kinds import OwnerReference
from tidemill.kuberay.owner import Owner
from tidemill.kuberay.reap import reap

pytestmark = pytest.mark.cluster


def test_a_cluster_whose_watcher_is_silent_is_reaped_and_one_that_is_watched_is_not(
    bench: Bench, reaper: KubernetesCluster
) -> None:
    bench.trainer_steps = 500
    bench.provision()
    bench.until(lambda: len(bench.pods()) >= 3)
    assert bench.job() not in [job.name for job in reap(reaper, 1800, time.time())]
    silent = {"metadata": {"annotations": {HEARTBEAT: f"{time.time() - 3600:.0f}"}}}
    bench.admin.patch(RAY_JOBS, bench.job(), silent)
    assert bench.job() in [job.name for job in reap(reaper, 1800, time.time(), dry_run=True)]
    assert bench.pods() != []
    found = {job.name: job.reason for job in reap(reaper, 1800, time.time())}
    assert found[bench.job()] == "its watcher gave no sign of life for 60 min"
    bench.until(lambda: not bench.left())


def test_a_cluster_goes_with_its_owner_and_its_watcher_says_so(bench: Bench) -> None:
    """The owner is a ConfigMap in place of a workflow, which the test bed does not know; garbage is collected alike."""
    name = f"owner-{bench.name}"
    owner = bench.admin.create(CONFIG_MAPS, {"metadata": {"name": name}})
    uid = owner["metadata"]["uid"]
    bench.owner = Owner(None, OwnerReference(name=name, uid=uid, api_version="v1", kind="ConfigMap"))
    bench.trainer_steps = 500
    bench.provision()
    with bench.followed() as watched:
        bench.until(lambda: len(bench.pods()) >= 3)
        bench.admin.delete(CONFIG_MAPS, name)
        with pytest.raises(ClusterError, match="was deleted from outside"):
            watched.result(480)
    assert bench.left() == []
