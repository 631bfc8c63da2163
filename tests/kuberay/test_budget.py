"""GPU hours, counted from pods."""

from __future__ import annotations

from typing import Any

import pytest
from kuberay_rig import Rig

from tidemill.errors import StoreError
from tidemill.kuberay.budget import GpuUsage, PodUsage, held_gpus, usage_key

GPU = "nvidia.com/gpu"
BEGIN = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


def pod(uid: str, gpus: int, phase: str = "Running", end: str | None = None) -> dict[str, Any]:
    since = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}
    state = {"state": {"terminated": {"finishedAt": end}}} if end else {"state": {"running": {}}}
    status = {"phase": phase, "conditions": [since], "containerStatuses": [state]}
    container = {"resources": {"limits": {GPU: str(gpus)} if gpus else {}}}
    return {"metadata": {"uid": uid}, "spec": {"containers": [container]}, "status": status}


def unscheduled(uid: str, gpus: int) -> dict[str, Any]:
    waits = pod(uid, gpus, "Pending")
    waits["status"]["conditions"] = []
    return waits


def test_gpu_hours_count_from_scheduling() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 8), pod("b", 1), pod("head", 0), unscheduled("c", 4)], GPU, BEGIN + 1800)
    assert usage.hours == pytest.approx(4.5)  # nine GPUs for half an hour


def test_pods_that_ended_or_disappeared_stop_counting() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 1), pod("b", 1)], GPU, BEGIN + 3600)
    usage.update([pod("b", 1, "Failed", "2027-01-15T08:30:00Z")], GPU, BEGIN + 7200)
    assert usage.hours == pytest.approx(1.5)  # an hour of a, half an hour of b


def test_time_without_a_watcher_counts_for_pods_that_still_run() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2)], GPU, BEGIN + 60)
    usage.update([pod("a", 2)], GPU, BEGIN + 7200)
    assert usage.hours == pytest.approx(4.0)


def test_a_pod_that_disappeared_without_a_watcher_counts_until_its_job_ended() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2), pod("b", 1)], GPU, BEGIN + 60)
    usage.update([pod("b", 1)], GPU, BEGIN + 7200, job_ended=BEGIN + 3600)
    assert usage.hours == pytest.approx(4.0)  # an hour of a, two of b, which still runs


def test_a_pod_that_was_replaced_under_a_watcher_counts_until_it_was_last_seen() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 1), pod("b", 1)], GPU, BEGIN + 1800)
    usage.update([pod("b", 1)], GPU, BEGIN + 1805)
    usage.update([], GPU, BEGIN + 7200, job_ended=BEGIN + 3600)
    assert usage.hours == pytest.approx(1.5)  # half an hour of a, an hour of b


def test_without_a_gpu_resource_nothing_is_counted() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2)], None, BEGIN + 3600)
    assert usage.hours == 0


def test_held_gpus_are_those_of_scheduled_pods_that_have_not_ended() -> None:
    assert held_gpus([pod("a", 2), pod("b", 1, "Succeeded", "2027-01-15T08:30:00Z"), unscheduled("c", 4)], GPU) == 2


def test_time_of_a_run_is_that_in_which_it_had_a_pod() -> None:
    usage = GpuUsage()
    usage.pods = {
        "engine": PodUsage(1, 100.0, 400.0),
        "head": PodUsage(0, 90.0, 300.0),
        "submitter": PodUsage(0, 395.0, 420.0),
        "head of the next attempt": PodUsage(0, 5000.0, 5100.0),
    }
    assert usage.seconds == pytest.approx(330.0 + 100.0)


def test_usage_is_saved_and_loaded(rig: Rig) -> None:
    assert GpuUsage.load(rig.store, rig.config.name).hours == 0
    usage = GpuUsage()
    usage.update([pod("a", 2)], GPU, BEGIN + 3600)
    usage.save(rig.store, rig.config.name)
    assert GpuUsage.load(rig.store, rig.config.name) == usage


def test_an_invalid_usage_object_is_an_error(rig: Rig) -> None:
    rig.store.put_bytes(usage_key(rig.config.name), b"[1]")
    with pytest.raises(StoreError, match=r"gpu-hours\.json: not a count of GPU hours.*Delete it"):
        GpuUsage.load(rig.store, rig.config.name)
