"""Which RayJobs a release deletes, and which objects a workflow owns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from kuberay_rig import Rig

from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import CONFIG_MAPS, RAY_JOBS, WORKFLOWS
from tidemill.kuberay.release import release_pipeline, release_run, release_this_pipeline
from tidemill.kuberay.run_status import KFP_RUN, MLFLOW_RUN, WORKFLOW, Owner, owner_reference


def test_all_attempts_of_a_run_are_deleted(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.attempts.create(2)
    assert release_run(rig.cluster, rig.config.name, None, rig.clock)
    assert rig.left() == []
    assert release_run(rig.cluster, rig.config.name, None, rig.clock)  # again, without RayJobs


def test_other_runs_are_not_deleted(rig: Rig) -> None:
    rig.watcher().provision()
    release_run(rig.cluster, "another", None, rig.clock)
    assert rig.left() == [rig.job()]


def test_a_pipeline_does_not_delete_a_run_that_another_one_has_adopted(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="old")
    rig.watcher().provision()
    rig.owner = Owner(kfp_run="new")
    rig.watcher().provision()
    assert not release_run(rig.cluster, rig.config.name, "old", rig.clock)
    assert rig.left() == [rig.job()]
    assert release_run(rig.cluster, rig.config.name, "new", rig.clock)
    assert rig.left() == []


def test_all_rayjobs_of_a_pipeline_are_deleted_without_its_settings(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="mine")
    rig.watcher().provision()
    release_pipeline(rig.cluster, "theirs", rig.clock)
    assert rig.left() == [rig.job()]
    release_pipeline(rig.cluster, "mine", rig.clock)
    assert rig.left() == []


def test_without_permission_to_list_rayjobs_there_are_none(rig: Rig) -> None:
    rig.cluster.forbidden = [("list", RAY_JOBS)]
    release_pipeline(rig.cluster, "mine", rig.clock)


def test_a_pipeline_releases_its_own_namespace_and_those_of_its_runs(rig: Rig, tmp_path: Path) -> None:
    rig.owner = Owner(kfp_run="mine")
    rig.watcher().provision()
    connected: list[str] = []

    def connect(namespace: str) -> FakeCluster:
        connected.append(namespace)
        return rig.cluster

    path = tmp_path / "namespace"
    release_this_pipeline("mine", {"tidemill"}, connect, path)
    assert connected == []  # outside of a cluster
    path.write_text("kubeflow\n")
    release_this_pipeline("", {"tidemill"}, connect, path)
    assert (connected, rig.left()) == ([], [rig.job()])
    release_this_pipeline("mine", {"tidemill", "other"}, connect, path)
    assert (connected, rig.left()) == (["kubeflow", "other", "tidemill"], [])


def test_objects_that_do_not_disappear_are_named(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["finalizers"] = ["ray.io/rayjob"]
    with pytest.raises(RunError, match=f"rayjobs/{rig.job()} still exist 300 s after their deletion"):
        release_run(rig.cluster, rig.config.name, None, rig.clock)


def test_the_owner_is_read_from_the_environment_of_the_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((WORKFLOW, "flow"), (KFP_RUN, "kfp-1"), (MLFLOW_RUN, "m-1")):
        monkeypatch.setenv(name, value)
    uid = rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow"}})["metadata"]["uid"]
    owner = Owner.of_this_step(rig.cluster)
    assert owner == Owner("kfp-1", owner_reference("flow", uid), "m-1", "tidemill/flow")
    rig.owner = replace(owner)
    rig.watcher().provision()
    head = rig.operator.job(rig.job())["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "MLFLOW_RUN_ID", "value": "m-1"} in head["env"]


def test_a_workflow_of_another_namespace_is_noted_and_owns_nothing(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORKFLOW, "flow")
    monkeypatch.setenv(KFP_RUN, "kfp-1")
    monkeypatch.delenv(MLFLOW_RUN, raising=False)
    (tmp_path / "namespace").write_text("kubeflow\n")
    rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow"}})  # of something else
    rig.owner = Owner.of_this_step(rig.cluster, tmp_path / "namespace")
    assert rig.owner == Owner("kfp-1", workflow="kubeflow/flow")
    rig.watcher().provision()
    metadata = rig.operator.job(rig.job())["metadata"]
    assert (metadata["annotations"]["tidemill.dev/workflow"], "ownerReferences" in metadata) == ("kubeflow/flow", False)


def test_outside_of_a_workflow_the_owner_needs_no_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WORKFLOW, KFP_RUN, MLFLOW_RUN):
        monkeypatch.delenv(name, raising=False)
    rig.cluster.missing = [WORKFLOWS]
    assert Owner.of_this_step(rig.cluster) == Owner()
    monkeypatch.setenv(WORKFLOW, "flow")
    with pytest.raises(ClusterError, match="install Argo Workflows"):
        Owner.of_this_step(rig.cluster)


def test_a_rayjob_that_is_being_deleted_is_waited_for_and_created_again(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["finalizers"] = ["ray.io/rayjob"]
    rig.cluster.delete(RAY_JOBS, rig.job())
    old = rig.operator.job(rig.job())["metadata"]["uid"]

    def finalize() -> None:
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(20, finalize)
    assert rig.watcher().provision() == 1
    assert rig.operator.job(rig.job())["metadata"]["uid"] != old


def test_a_released_run_starts_no_further_attempt(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="mine")
    status = rig.status
    for release in (
        lambda: release_run(rig.cluster, rig.config.name, "mine", rig.clock),
        lambda: release_pipeline(rig.cluster, "mine", rig.clock),
        lambda: release_run(rig.cluster, rig.config.name, None, rig.clock),
    ):
        rig.watcher().provision()
        assert status.closed() is None
        release()
        assert "was released" in str(status.closed())


def test_a_client_that_may_not_patch_config_maps_still_deletes_the_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.forbidden = [("patch", CONFIG_MAPS)]
    assert release_run(rig.cluster, rig.config.name, None, rig.clock)
    assert rig.left() == []


@pytest.mark.parametrize("away", [0, 1])
def test_a_release_outlasts_an_outage_of_the_api_server(rig: Rig, away: int) -> None:
    """Before the deletion, and during the wait for it."""
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.job(rig.job())["metadata"]["finalizers"] = ["ray.io/rayjob"]

    def finalize() -> None:
        rig.cluster.away = False
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        if rig.operator.job(rig.job())["metadata"].get("deletionTimestamp"):
            rig.cluster.delete(RAY_JOBS, rig.job())

    rig.cluster.away = away == 0
    rig.clock.after(1, lambda: setattr(rig.cluster, "away", True))
    rig.clock.after(200, finalize)
    assert release_run(rig.cluster, rig.config.name, None, rig.clock)
    assert rig.left() == []


def test_a_release_fails_if_the_api_server_stays_away(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.away = True
    with pytest.raises(RunError, match="does not answer"):
        release_run(rig.cluster, rig.config.name, None, rig.clock)
