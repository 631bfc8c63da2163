"""The GPU budget of a watched run; test_budget tests the count."""

from __future__ import annotations

import pytest
from kuberay_rig import Killed, Rig, killed, with_kubernetes

from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.budget import GpuUsage, PodUsage
from tidemill.kuberay.cluster import RAY_CLUSTERS
from tidemill.store.attempt import Attempt


def test_a_used_up_budget_stops_the_run(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=1.0)
    first = rig.watcher().provision()
    rig.starts()
    asked: list[float] = []

    def look() -> None:
        if Attempt(rig.config.name, 1).asked_to_stop(rig.store) is not None:
            asked.append(rig.clock.now)
            rig.succeeds()
        else:
            rig.clock.after(10, look)

    begin = rig.clock.now + 15
    rig.clock.after(20, look)
    rig.watcher().follow(first)
    assert asked[0] - begin == pytest.approx(1800, abs=30)  # two GPUs for half an hour
    assert "the budget of 1 GPU hours is used up" in rig.output.getvalue()


def test_a_run_over_budget_that_does_not_end_is_deleted(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=0.1)
    first = rig.watcher().provision()
    rig.starts()
    with pytest.raises(ClusterError, match="did not end within 900 s and was deleted"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_gpu_hours_of_a_run_without_a_watcher_count_until_its_end(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(15 + 300, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    rig.clock.after(3600 - 300, rig.succeeds)
    rig.clock.after(3700 - 300, lambda: rig.cluster.delete(RAY_CLUSTERS, f"{rig.job()}-cluster"))
    rig.clock.sleep(7200)
    rig.watcher().follow(first)
    assert GpuUsage.load(rig.store, rig.config.name).hours == pytest.approx(2.0, abs=0.02)  # two GPUs for an hour


def test_the_budget_counts_all_attempts_and_outlives_the_watcher(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=1.0)
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(15 + 1500, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    rig.clock.after(10, lambda: rig.fails(1, RunError("lost")))
    rig.starts(2, after=30)
    with pytest.raises(ClusterError, match="budget of 1 GPU hours"):
        rig.watcher().follow(first)
    assert GpuUsage.load(rig.store, rig.config.name).hours == pytest.approx(1.0 + 2 * 900 / 3600, abs=0.05)
    with pytest.raises(ClusterError, match="budget of 1 GPU hours"):
        rig.watcher().follow(first)
    with pytest.raises(ClusterError, match="Raise it to continue"):
        rig.watcher().provision()


def test_a_budget_that_waiting_pods_use_up_ends_the_run_before_it_starts(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=0.1)
    first, begin = rig.watcher().provision(), rig.clock.now
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(10, lambda: rig.operator.ready(f"{rig.job()}-cluster-trainer-0"))
    taken = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims."
    rig.clock.after(10, lambda: rig.operator.unschedulable(f"{rig.job()}-cluster-rollout-0", taken))
    with pytest.raises(ClusterError, match=r"stopped before it started: the budget of 0\.1 GPU hours is used up"):
        rig.watcher().follow(first)
    assert rig.clock.now - begin == pytest.approx(10 + 360, abs=10)  # one GPU for a tenth of an hour
    assert rig.left() == []


def test_a_refusal_of_provision_is_recorded(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=1.0)
    watcher = rig.watcher()
    watcher.usage.pods["uid"] = PodUsage(4, 0.0, 3600.0)
    with pytest.raises(ClusterError, match="budget"):
        watcher.provision()
    assert "budget of 1 GPU hours" in rig.status.fields()["error"]
