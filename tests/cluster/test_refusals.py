"""What keeps a run from starting on a real cluster: within a minute one clear message, and no pod stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_rig import QUOTAS, Bench

from tidemill.errors import ClusterError
from tidemill.kuberay.access import check_access
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import RAY_JOBS
from tidemill.kuberay.names import STOP

pytestmark = pytest.mark.cluster

MINUTE = 60.0


def refused(bench: Bench, message: str) -> None:
    """The run ends with the message, soon, and leaves nothing."""
    began = time.monotonic()
    number = bench.provision()
    with pytest.raises(ClusterError, match=message):
        bench.follow(number)
    told = time.monotonic() - began
    assert bench.left() == []
    assert told < MINUTE + 30, "the message comes within a minute, the end of the pods takes up to 30 s"


def test_an_image_that_does_not_exist(bench: Bench) -> None:
    bench.kubernetes = {"image": "localhost/no-such-image:1"}
    refused(bench, r"cannot get its image localhost/no-such-image:1: .*Mend kubernetes\.image")


def test_a_secret_that_is_missing(bench: Bench) -> None:
    bench.kubernetes = {"store_secret": "no-such-secret"}
    refused(bench, r'cannot start: CreateContainerConfigError: secret "no-such-secret" not found')


def test_a_gpu_type_that_no_node_has(bench: Bench) -> None:
    bench.kubernetes = {"gpu_type": "NO-SUCH-GPU"}
    refused(bench, r"nvidia\.com/gpu\.product=NO-SUCH-GPU.*didn't match")


def test_more_cores_than_a_node_has(bench: Bench) -> None:
    bench.kubernetes = {"rollout": {"cpus": 1000, "memory_gib": 1, "shared_memory_gib": 1}}
    refused(bench, r"no node can hold pod .*Insufficient cpu")


def test_a_service_account_that_is_missing(bench: Bench) -> None:
    bench.kubernetes = {"service_account": "no-such-account"}
    refused(bench, r'the cluster refuses the pods of the run: .*serviceaccount "no-such-account" not found')


@contextmanager
def quota(admin: KubernetesCluster) -> Iterator[None]:
    """One GPU for the namespace, and other things without end."""
    hard = {"requests.nvidia.com/gpu": "1"}
    admin.create(QUOTAS, {"metadata": {"name": "gpus"}, "spec": {"hard": hard}})
    try:
        yield
    finally:
        admin.delete(QUOTAS, "gpus")


def test_a_quota_that_is_exceeded(bench: Bench) -> None:
    with quota(bench.admin):
        refused(bench, r"the cluster refuses the pods of the run: exceeded quota: gpus, requested: requests\.nvidia")


def test_a_cluster_without_room_is_given_up_after_the_start_timeout_and_says_what_it_waits_for(bench: Bench) -> None:
    other = Bench(bench.admin, bench.steps, bench.store, bench.folder / "other")
    other.kubernetes = {"rollout": {"cpus": 1.2, "memory_gib": 1, "shared_memory_gib": 1}}
    bench.kubernetes = other.kubernetes | {"start_timeout_s": 60}
    other.trainer_steps = 500
    other.provision()
    other.until(lambda: other.status().get("jobDeploymentStatus") == "Running")
    try:
        refused(bench, r"start_timeout_s = 60 s: .*Insufficient cpu")
    finally:
        other.clear()


def test_a_run_that_waits_for_kueue_says_so_and_ends_when_it_is_told_to(bench: Bench) -> None:
    bench.kubernetes = {"queue": "gpus"}
    bench.provision()
    with bench.followed() as watched:
        bench.until_shown("waits for room in Kueue's queue gpus")
        assert bench.pods() == []
        bench.admin.patch(RAY_JOBS, bench.job(), {"metadata": {"annotations": {STOP: "changed my mind"}}})
        with pytest.raises(ClusterError, match="stopped before it began: changed my mind"):
            watched.result(60)
    assert bench.left() == []


def test_no_permission(bench: Bench, reaper: KubernetesCluster) -> None:
    with pytest.raises(ClusterError, match=r"no permission in namespace .* to create.*rayjobs\.ray\.io"):
        check_access(bench.config, reaper)
    with pytest.raises(ClusterError, match=r"no permission to get rayjobs\.ray\.io .*tidemill-reaper"):
        reaper.get(RAY_JOBS, "x")


def test_the_rights_of_a_step_are_enough(bench: Bench) -> None:
    check_access(bench.config, bench.steps)
