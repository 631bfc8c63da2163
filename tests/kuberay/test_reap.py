"""The RayJobs that the reaper deletes, and those that it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import Server
from fake_cluster import FakeCluster
from kuberay_rig import Rig, with_kubernetes

from tidemill.config.names import HEARTBEAT
from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import CONFIG_MAPS, PODS, RAY_JOBS, WORKFLOWS
from tidemill.kuberay.reap import STATUS_KEPT_S, TOKEN_PATH, KfpRuns, delete_old_status, reap
from tidemill.kuberay.run_status import Owner

HALF_AN_HOUR = 1800.0


def reasons(rig: Rig, kfp: FakeCluster | None = None, **more: object) -> dict[str, str]:
    """Name and reason of all RayJobs that are reaped; the namespace of KFP's steps is `kfp`, else that of the run."""
    spaces = {cluster.namespace: cluster for cluster in (rig.cluster, kfp) if cluster is not None}
    found = reap(rig.cluster, HALF_AN_HOUR, rig.clock.now, spaces.__getitem__, **more)  # type: ignore[arg-type]
    return {job.name: job.reason for job in found}


def test_a_run_whose_watcher_was_killed_is_reaped_with_all_its_pods(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.clock.sleep(1790)
    assert reasons(rig) == {}
    rig.clock.sleep(20)
    assert reasons(rig) == {rig.job(): "its watcher has written no heartbeat for 30 min"}
    assert rig.left() == []


def test_a_dry_run_deletes_nothing(rig: Rig) -> None:
    rig.watcher().provision()
    rig.clock.sleep(3600)
    assert list(reasons(rig, dry_run=True)) == [rig.job()]
    assert rig.left() == [rig.job()]


def test_a_run_that_has_ended_is_deleted_after_its_time_to_live(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="kfp-1")
    with_kubernetes(rig, keep_s=600)
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.succeed(rig.job())
    rig.clock.sleep(590)
    assert reasons(rig, is_over=lambda run: True) == {}
    rig.clock.sleep(20)
    assert reasons(rig, is_over=lambda run: False) == {}, "another step of its pipeline may follow"
    assert reasons(rig, is_over=lambda run: True) == {rig.job(): "its KFP run kfp-1 is over"}


def test_a_run_that_ended_in_a_pipeline_that_goes_on_is_deleted_half_an_hour_later(rig: Rig) -> None:
    """KFP's Retry runs the last steps again, but not the exit handler."""
    rig.owner = Owner(kfp_run="kfp-1")
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.succeed(rig.job())
    rig.clock.sleep(1790)
    assert reasons(rig, is_over=lambda run: False) == {}
    rig.clock.sleep(20)
    assert list(reasons(rig, is_over=lambda run: False)) == [rig.job()]


def test_a_cluster_that_is_kept_for_long_stays_without_a_watcher(rig: Rig) -> None:
    with_kubernetes(rig, keep_s=7200)
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.succeed(rig.job())
    rig.clock.sleep(7100)
    assert reasons(rig) == {}
    rig.clock.sleep(200)
    assert list(reasons(rig)) == [rig.job()]


def test_a_job_that_was_refused_has_no_end_and_is_deleted(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["status"] = {"jobDeploymentStatus": "ValidationFailed"}
    rig.clock.sleep(1790)
    assert reasons(rig) == {}
    rig.clock.sleep(20)
    assert list(reasons(rig)) == [rig.job()]


def test_a_job_without_a_heartbeat_counts_from_its_creation(rig: Rig) -> None:
    rig.watcher().provision()
    del rig.operator.job(rig.job())["metadata"]["annotations"]
    rig.clock.sleep(1700)
    assert reasons(rig) == {}
    rig.clock.sleep(200)
    assert list(reasons(rig)) == [rig.job()]


def test_a_watched_run_whose_pipeline_is_over_is_reaped(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="kfp-1")
    rig.watcher().provision()
    assert reasons(rig, is_over=lambda run: False) == {}
    assert reasons(rig, is_over=lambda run: run == "kfp-1") == {rig.job(): "its KFP run kfp-1 is over"}


def test_a_watched_run_whose_workflow_is_gone_is_reaped_although_kfp_calls_it_running(rig: Rig) -> None:
    """Its namespace is KFP's, which the RayJob cannot have as its owner."""
    kfp = FakeCluster(rig.clock, "kubeflow")
    kfp.create(WORKFLOWS, {"metadata": {"name": "flow"}})
    rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow"}})
    rig.owner = Owner("kfp-1", workflow="kubeflow/flow")
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    assert reasons(rig, kfp, is_over=lambda run: False) == {}
    kfp.delete(WORKFLOWS, "flow")
    gone = {rig.job(): "its workflow flow in namespace kubeflow is gone"}
    assert reasons(rig, kfp, is_over=lambda run: False) == gone
    assert rig.left() == ["flow"]


def test_a_workflow_that_is_being_deleted_is_gone(rig: Rig) -> None:
    rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow", "finalizers": ["workflows.argoproj.io/artifact-gc"]}})
    rig.owner = Owner("kfp-1", workflow="tidemill/flow")
    rig.watcher().provision()
    assert reasons(rig) == {}
    rig.cluster.delete(WORKFLOWS, "flow")
    assert list(reasons(rig)) == [rig.job()]


def test_a_run_that_another_pipeline_has_adopted_has_its_workflow(rig: Rig) -> None:
    rig.cluster.create(WORKFLOWS, {"metadata": {"name": "new"}})
    for kfp_run, workflow in (("kfp-1", "tidemill/old"), ("kfp-2", "tidemill/new")):
        rig.owner = Owner(kfp_run, workflow=workflow)
        rig.watcher().provision()
    assert reasons(rig) == {}


def test_each_of_kfp_and_the_workflow_is_looked_at_without_the_other(rig: Rig) -> None:
    rig.owner = Owner("kfp-1", workflow="tidemill/flow")
    rig.watcher().provision()

    def is_away(run: str) -> bool:
        raise RunError("KFP cannot be reached")

    assert list(reasons(rig, is_over=is_away, dry_run=True)) == [rig.job()]
    rig.cluster.forbidden = [("get", WORKFLOWS)]
    with pytest.raises(ClusterError, match="no permission to get workflows"):
        reasons(rig, is_over=lambda run: True)
    assert rig.left() == []


def test_jobs_of_others_are_left_alone(rig: Rig) -> None:
    rig.cluster.create(RAY_JOBS, {"metadata": {"name": "theirs"}, "spec": {}})
    rig.clock.sleep(10**6)
    assert reasons(rig) == {}
    assert rig.left() == ["theirs"]


def test_the_reaper_needs_no_permission_for_pods(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.forbidden = [("list", PODS), ("get", RAY_JOBS)]
    rig.clock.sleep(3600)
    assert list(reasons(rig)) == [rig.job()]


def test_a_reaper_without_permissions_fails(rig: Rig) -> None:
    rig.cluster.forbidden = [("list", RAY_JOBS)]
    with pytest.raises(ClusterError, match="no permission to list rayjobs"):
        reasons(rig)


def test_status_of_a_run_is_deleted_after_two_weeks_and_other_config_maps_stay(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.create(CONFIG_MAPS, {"metadata": {"name": "theirs"}, "data": {"updated": "0"}})
    delete_old_status(rig.cluster, rig.clock.now + STATUS_KEPT_S - 10)
    assert len(rig.cluster.list(CONFIG_MAPS)) == 2
    delete_old_status(rig.cluster, rig.clock.now + STATUS_KEPT_S + 10)
    assert [status["metadata"]["name"] for status in rig.cluster.list(CONFIG_MAPS)] == ["theirs"]


@pytest.mark.parametrize("heartbeat", ["0", "-5", "soon", "1e9", "", f"{10**13}"])
def test_an_impossible_heartbeat_does_not_keep_a_cluster_for_ever(rig: Rig, heartbeat: str) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT] = heartbeat
    rig.clock.sleep(1700)
    assert reasons(rig) == {}  # the age of the RayJob counts
    rig.clock.sleep(200)
    assert list(reasons(rig)) == [rig.job()]


def test_a_watcher_with_a_clock_some_minutes_off_is_alive(rig: Rig) -> None:
    rig.watcher().provision()
    rig.clock.sleep(3600)
    for minutes in (-20, 20):
        heartbeat = f"{rig.clock.now + 60 * minutes:.0f}"
        rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT] = heartbeat
        assert reasons(rig) == {}


def test_an_error_about_one_job_does_not_keep_the_others(rig: Rig) -> None:
    """No permission for the workflow of the first, no answer of KFP about the second, no heartbeat of the third."""
    owned = Owner("kfp-1", workflow="tidemill/flow")
    for name, owner in (("a-owned", owned), ("b-asked", Owner(kfp_run="kfp-2")), ("c-silent", Owner())):
        rig.config, rig.owner = rig.config.model_copy(update={"name": name}), owner
        rig.watcher().provision()
    rig.operator.job("c-silent-a1")["metadata"]["annotations"][HEARTBEAT] = "1000"
    rig.clock.sleep(60)
    rig.operator.job("c-silent-a1")["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    rig.cluster.forbidden = [("get", WORKFLOWS)]

    def is_over(run: str) -> bool:
        raise RunError("KFP cannot be reached")

    reaped = reap(rig.cluster, HALF_AN_HOUR, rig.clock.now, lambda namespace: rig.cluster, is_over)
    assert next(reaped).name == "c-silent-a1"
    with pytest.raises(ClusterError, match="no permission to get workflows"):
        next(reaped)
    assert rig.left() == ["a-owned-a1", "b-asked-a1"]


@pytest.mark.parametrize(
    ("state", "over"),
    [
        ("RUNNING", False),
        ("PENDING", False),
        ("PAUSED", False),
        ("SUCCEEDED", True),
        ("FAILED", True),
        ("CANCELED", True),
    ],
)
def test_a_run_is_over_once_kfp_says_so(server: Server, state: str, over: bool) -> None:
    server.answers = [(200, {"state": state})]
    assert KfpRuns(f"{server.url}/").is_over("r-1") is over
    assert server.asked[0][:2] == ("GET", "/apis/v2beta1/runs/r-1")


def test_a_deleted_run_is_over(server: Server) -> None:
    server.answers = [(404, {"error": "not found"})]
    assert KfpRuns(server.url).is_over("r-1")


def test_a_refusal_and_an_outage_of_kfp_are_errors(server: Server) -> None:
    server.answers = [(401, "unauthorized")]
    with pytest.raises(ClusterError, match="refuses to return run r-1: status 401"):
        KfpRuns(server.url).is_over("r-1")
    with pytest.raises(RunError, match=r"KFP at http://127\.0\.0\.1:1 cannot be reached"):
        KfpRuns("http://127.0.0.1:1").is_over("r-1")


def test_the_token_of_the_pod_is_sent(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t-1\n")
    monkeypatch.setenv(TOKEN_PATH, str(tmp_path / "token"))
    server.answers = [(200, {"state": "RUNNING"})]
    KfpRuns(server.url).is_over("r-1")
    assert server.authorizations == ["Bearer t-1"]
