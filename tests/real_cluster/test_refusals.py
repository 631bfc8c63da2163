"""Runs that cannot start on a real cluster: they soon end with one clear error, and no pod is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from cluster_rig import QUOTAS, SMALL, ClusterRun

from tidemill.config.kubernetes import KubernetesConfig
from tidemill.config.names import STOP
from tidemill.errors import ClusterError, TidemillError
from tidemill.kuberay.access import check_access
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import CONFIG_MAPS, RAY_JOBS, SECRETS
from tidemill.kuberay.status import look
from tidemill.store.object_store import ObjectStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SOON_S = KubernetesConfig().start_timeout_s / 4  # long before the start timeout
WORKER = SMALL | {"shared_memory_gib": 1}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "image": (
        {"image": "localhost/no-such-image:1"},
        r"cannot pull its image localhost/no-such-image:1: .*Correct kubernetes\.image",
    ),
    "secret": ({"store_secret": "none"}, r'cannot start: CreateContainerConfigError: secret "none" not found'),
    "further secret": ({"secrets": ["none"]}, r'cannot start: CreateContainerConfigError: secret "none" not found'),
    "gpu type": ({"gpu_type": "NO-SUCH-GPU"}, r"nvidia\.com/gpu\.product=NO-SUCH-GPU.*didn't match"),
    "size": ({"rollout": WORKER | {"cpus": 1000}}, r"no node can hold pod .*Insufficient cpu"),
    "account": (
        {"service_account": "none"},
        r'the cluster refuses the pods of the run: .*serviceaccount "none" not found',
    ),
}


@dataclass(frozen=True)
class End:
    """How a run ended: its error, its duration, the objects that are left, and the output of `tidemill status`."""

    error: TidemillError
    seconds: float
    left: list[str]
    status: str


def end_of(run: ClusterRun, settings: dict[str, Any]) -> End:
    """Start a run that is refused, and follow it."""
    run.kubernetes, began = settings, time.monotonic()
    number = run.provision()
    with pytest.raises(ClusterError) as caught:
        run.follow(number)
    seconds = time.monotonic() - began
    (status,) = look(run.admin, run.name, time.time())
    return End(caught.value, seconds, run.left(), "\n".join(status.lines()))


@pytest.fixture(scope="module")
def ends(
    admin: KubernetesCluster, steps: KubernetesCluster, store: ObjectStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[End]]]:
    """All refused runs at the same time, because they use few resources."""
    with ThreadPoolExecutor(len(CASES)) as threads:
        runs = {name: ClusterRun(admin, steps, store, tmp_path_factory.mktemp("run")) for name in CASES}
        yield {name: threads.submit(end_of, run, CASES[name][0]) for name, run in runs.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_cannot_start_ends_with_the_reason(ends: dict[str, Future[End]], case: str) -> None:
    end = ends[case].result(SOON_S)
    assert (end.left, end.seconds < SOON_S) == ([], True)
    with pytest.raises(ClusterError, match=CASES[case][1]):
        raise end.error
    assert "0 GPUs held" in end.status
    assert str(end.error) in end.status


def test_keys_that_the_store_rejects_end_the_run_with_its_first_attempt(run: ClusterRun) -> None:
    keys = {"access_key": os.environ["TIDEMILL_S3_ACCESS_KEY"], "secret_key": "wrong"}
    run.admin.create(SECRETS, {"metadata": {"name": "wrong-keys"}, "stringData": keys})
    end = end_of(run, {"store_secret": "wrong-keys", "max_restarts": 3})
    assert "the driver failed: exit code 2\nbucket tidemill at " in str(end.error)
    assert "Check the keys in" in str(end.error)
    assert (end.left, "attempt 1" in end.status) == ([], True)


@contextmanager
def quota(admin: KubernetesCluster) -> Iterator[None]:
    """One GPU for the namespace, and no other quota."""
    admin.create(QUOTAS, {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}})
    try:
        yield
    finally:
        admin.delete(QUOTAS, "gpus")


def test_an_exceeded_quota_ends_the_run(run: ClusterRun) -> None:
    with quota(run.admin):
        end = end_of(run, {})
    assert "the cluster refuses the pods of the run: exceeded quota: gpus, requested: requests.nvidia" in str(end.error)
    assert (end.left, end.seconds < SOON_S) == ([], True)


def test_a_real_cluster_without_room_fails_after_the_start_timeout(run: ClusterRun) -> None:
    """Two runs of five GPUs each, on eight GPUs."""
    first = ClusterRun(run.admin, run.steps, run.store, run.folder / "first")
    first.tensor_parallel_size = run.tensor_parallel_size = 4
    first.trainer_steps = 1000  # so that it holds its GPUs
    first.provision()
    try:
        first.until(lambda: len(first.pods()) >= 3 and all(pod["spec"].get("nodeName") for pod in first.pods()))
        end = end_of(run, {"start_timeout_s": 60})
    finally:
        first.clear()
    assert "does not run after kubernetes.start_timeout_s = 60 s" in str(end.error)
    assert "Insufficient nvidia.com/gpu" in str(end.error)
    assert end.left == []


def test_a_run_that_waits_for_kueue_can_be_stopped(run: ClusterRun) -> None:
    run.kubernetes = {"queue": "gpus"}
    run.provision()
    with run.followed() as watched:
        run.until_shown("waits for Kueue's queue gpus")
        assert run.pods() == []
        run.admin.patch(RAY_JOBS, run.job(), {"metadata": {"annotations": {STOP: "changed my mind"}}})
        with pytest.raises(ClusterError, match="stopped before it started: changed my mind"):
            watched.result(240)
    assert run.left() == []


def test_missing_permissions_are_refused(run: ClusterRun, reaper: KubernetesCluster) -> None:
    with pytest.raises(ClusterError, match=r"no permission in namespace .* to create.*rayjobs\.ray\.io"):
        check_access(run.config, reaper)
    with pytest.raises(ClusterError, match=r"no permission to get rayjobs\.ray\.io .*tidemill-reaper"):
        reaper.get(RAY_JOBS, "x")
    assert not reaper.is_allowed("create", CONFIG_MAPS)


def test_the_permissions_of_a_step_suffice(run: ClusterRun) -> None:
    check_access(run.config, run.steps)
