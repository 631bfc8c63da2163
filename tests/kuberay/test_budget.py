"""GPU hours, counted from pods."""

from __future__ import annotations

from typing import Any

import pytest
from kuberay_rig import Rig

from tidemill.errors import StoreError
from tidemill.kuberay.budget import GpuUsage, held_gpus, usage_key

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


def test_hours_are_gpus_times_time_since_the_node_was_given() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 8), pod("b", 1), pod("head", 0), unscheduled("c", 4)], GPU, BEGIN + 1800)
    assert usage.hours == pytest.approx(4.5)  # nine GPUs for half an hour


def test_a_pod_that_is_gone_or_has_ended_costs_nothing_more() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 1), pod("b", 1)], GPU, BEGIN + 3600)
    usage.update([pod("b", 1, "Failed", "2027-01-15T08:30:00Z")], GPU, BEGIN + 7200)
    assert usage.hours == pytest.approx(1.5)  # an hour of a, half an hour of b


def test_nobody_watching_does_not_hide_the_hours_of_a_pod_that_lives_on() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2)], GPU, BEGIN + 60)
    usage.update([pod("a", 2)], GPU, BEGIN + 7200)
    assert usage.hours == pytest.approx(4.0)


def test_a_pod_that_went_away_while_nobody_watched_counts_until_its_job_ended() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2), pod("b", 1)], GPU, BEGIN + 60)
    usage.update([pod("b", 1)], GPU, BEGIN + 7200, job_ended=BEGIN + 3600)
    assert usage.hours == pytest.approx(4.0)  # an hour of a, two of b, which is still there


def test_a_pod_that_was_replaced_while_someone_watched_counts_no_longer_than_it_was_there() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 1), pod("b", 1)], GPU, BEGIN + 1800)
    usage.update([pod("b", 1)], GPU, BEGIN + 1805)
    usage.update([], GPU, BEGIN + 7200, job_ended=BEGIN + 3600)
    assert usage.hours == pytest.approx(1.5)  # half an hour of a, an hour of b


def test_without_a_gpu_resource_nothing_is_counted() -> None:
    usage = GpuUsage()
    usage.update([pod("a", 2)], None, BEGIN + 3600)
    assert usage.hours == 0


def test_what_pods_hold_now() -> None:
    assert held_gpus([pod("a", 2), pod("b", 1, "Succeeded", "2027-01-15T08:30:00Z"), unscheduled("c", 4)], GPU) == 2


def test_the_count_survives_in_the_store(rig: Rig) -> None:
    assert GpuUsage.load(rig.store, rig.config.name).hours == 0
    usage = GpuUsage()
    usage.update([pod("a", 2)], GPU, BEGIN + 3600)
    usage.save(rig.store, rig.config.name)
    assert GpuUsage.load(rig.store, rig.config.name) == usage


def test_a_broken_count_is_named(rig: Rig) -> None:
    rig.store.put_bytes(usage_key(rig.config.name), b"[1]")
    with pytest.raises(StoreError, match=r"gpu-hours\.json: not a count of GPU hours.*Delete it"):
        GpuUsage.load(rig.store, rig.config.name)
