"""A watched run whose pods cannot be scheduled or wait for room."""

from __future__ import annotations

import pytest
from kuberay_rig import Rig, with_kubernetes

from tidemill.errors import ClusterError
from tidemill.kuberay.cluster import PODS


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", 'failed to pull image "tidemill:1": not found'),
        ("ImagePullBackOff", 'Back-off pulling image "tidemill:1"'),
        ("CreateContainerConfigError", 'secret "tidemill-store" not found'),
        ("CreateContainerConfigError", "couldn't find key access_key in Secret tidemill/tidemill-store"),
    ],
)
def test_a_pod_that_cannot_start_ends_the_run_within_a_minute(rig: Rig, reason: str, message: str) -> None:
    first, begin = rig.watcher().provision(), rig.clock.now
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(5, lambda: rig.operator.waiting(f"{rig.job()}-cluster-head", reason, message))
    with pytest.raises(ClusterError) as caught:
        rig.watcher().follow(first)
    assert message in str(caught.value)
    assert rig.clock.now - begin < 60
    assert rig.left() == []


def test_a_gpu_type_that_no_node_has_ends_the_run_within_a_minute(rig: Rig) -> None:
    with_kubernetes(rig, gpu_type="H300")
    first, begin = rig.watcher().provision(), rig.clock.now
    message = (
        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: 0/2 nodes are "
        "available: 2 Preemption is not helpful for scheduling."
    )
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(3, lambda: rig.operator.unschedulable(f"{rig.job()}-cluster-rollout-0", message))
    with pytest.raises(ClusterError, match=r"nvidia.com/gpu.product=H300.*didn't match"):
        rig.watcher().follow(first)
    assert rig.clock.now - begin < 60
    assert rig.left() == []


def test_a_quota_that_is_used_up_ends_the_run_within_a_minute(rig: Rig) -> None:
    first, begin = rig.watcher().provision(), rig.clock.now
    message = 'pods "x-head" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, limited: 1'
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(3, lambda: rig.operator.refuse_pods(rig.job(), message))
    with pytest.raises(ClusterError, match="the cluster refuses the pods of the run: exceeded quota: gpus"):
        rig.watcher().follow(first)
    assert rig.clock.now - begin < 60
    assert rig.left() == []


def test_a_cluster_without_room_fails_after_the_start_timeout(rig: Rig) -> None:
    with_kubernetes(rig, start_timeout_s=600)
    first, begin = rig.watcher().provision(), rig.clock.now
    taken = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims."
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(3, lambda: rig.operator.unschedulable(f"{rig.job()}-cluster-rollout-0", taken))
    with pytest.raises(ClusterError, match=r"start_timeout_s = 600 s.*Insufficient nvidia.com/gpu"):
        rig.watcher().follow(first)
    assert 600 < rig.clock.now - begin < 620
    assert rig.left() == []


def test_a_queued_run_waits_for_longer_than_the_start_timeout_and_says_so(rig: Rig) -> None:
    with_kubernetes(rig, start_timeout_s=60, queue="gpus")
    first = rig.watcher().provision()
    rig.clock.after(700, lambda: rig.operator.job(rig.job())["spec"].update(suspend=False))
    rig.starts(after=700)
    rig.clock.after(800, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    assert "queued: waits for Kueue's queue gpus" in rig.output.getvalue()


def test_a_run_that_kueue_suspends_and_resumes_stays_the_same_attempt(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    status = {"jobDeploymentStatus": "Suspended", "jobStatus": "", "rayJobInfo": {}}
    rig.clock.after(50, lambda: rig.operator.job(rig.job())["status"].update(status))
    rig.clock.after(51, lambda: rig.cluster.delete(PODS, f"{rig.job()}-cluster-head"))
    rig.clock.after(700, lambda: rig.cluster.objects.pop((PODS, f"{rig.job()}-cluster-trainer-0")))
    rig.starts(after=700)
    rig.clock.after(800, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    assert rig.cluster.created.count(rig.job()) == 1
    assert rig.job(2) not in rig.cluster.created
