"""What is reaped, and what is left alone."""

from __future__ import annotations

import pytest
from kuberay_rig import Rig

from tidemill.config.names import HEARTBEAT
from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import CONFIG_MAPS, PODS, RAY_JOBS, WORKFLOWS
from tidemill.kuberay.kinds import OwnerReference
from tidemill.kuberay.owner import Owner
from tidemill.kuberay.reap import KEPT_S, reap, sweep

HALF_AN_HOUR = 1800.0


def reasons(rig: Rig, **more: object) -> dict[str, str]:
    return {job.name: job.reason for job in reap(rig.cluster, HALF_AN_HOUR, rig.clock.now, **more)}  # type: ignore[arg-type]


def test_a_run_whose_watcher_was_killed_is_reaped_with_all_its_pods(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.clock.sleep(1790)
    assert reasons(rig) == {}
    rig.clock.sleep(20)
    assert reasons(rig) == {rig.job(): "its watcher gave no sign of life for 30 min"}
    assert rig.left() == []


def test_a_dry_run_only_tells(rig: Rig) -> None:
    rig.watcher().provision()
    rig.clock.sleep(3600)
    assert list(reasons(rig, dry_run=True)) == [rig.job()]
    assert rig.left() == [rig.job()]


def test_a_run_that_ended_by_itself_is_left_to_its_time_to_live_and_goes_after_a_day(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="kfp-1")
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.succeed(rig.job())
    rig.clock.sleep(3600)
    assert reasons(rig, is_over=lambda run: True) == {}
    rig.clock.sleep(24 * 3600)
    assert reasons(rig) == {rig.job(): "it ended 1 day ago"}


def test_a_job_that_nobody_ever_watched_counts_from_its_creation(rig: Rig) -> None:
    rig.watcher().provision()
    del rig.operator.job(rig.job())["metadata"]["annotations"]
    rig.clock.sleep(1700)
    assert reasons(rig) == {}
    rig.clock.sleep(200)
    assert list(reasons(rig)) == [rig.job()]


def test_a_run_whose_pipeline_is_over_is_reaped_though_it_is_watched(rig: Rig) -> None:
    rig.owner = Owner(kfp_run="kfp-1")
    rig.watcher().provision()
    assert reasons(rig, is_over=lambda run: False) == {}
    assert reasons(rig, is_over=lambda run: run == "kfp-1") == {rig.job(): "its KFP run kfp-1 is over"}


def test_a_run_whose_workflow_is_gone_or_was_made_anew_is_reaped(rig: Rig) -> None:
    flow = rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow"}})
    rig.owner = Owner(None, OwnerReference(name="flow", uid=flow["metadata"]["uid"]))
    rig.watcher().provision()
    assert reasons(rig) == {}
    del rig.cluster.objects[WORKFLOWS, "flow"]
    assert reasons(rig, dry_run=True) == {rig.job(): "its workflow flow is gone"}
    rig.cluster.create(WORKFLOWS, {"metadata": {"name": "flow"}})
    assert reasons(rig) == {rig.job(): "its workflow flow is gone"}


def test_jobs_of_others_are_left_alone(rig: Rig) -> None:
    rig.cluster.create(RAY_JOBS, {"metadata": {"name": "theirs"}, "spec": {}})
    rig.clock.sleep(10**6)
    assert reasons(rig) == {}
    assert rig.left() == ["theirs"]


def test_the_reaper_needs_no_right_to_look_at_pods(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.forbidden = [("list", PODS), ("get", RAY_JOBS)]
    rig.clock.sleep(3600)
    assert list(reasons(rig)) == [rig.job()]


def test_a_reaper_without_rights_says_so(rig: Rig) -> None:
    rig.cluster.forbidden = [("list", RAY_JOBS)]
    with pytest.raises(ClusterError, match="no permission to list rayjobs"):
        reasons(rig)


def test_notes_of_runs_go_after_two_weeks_and_other_config_maps_stay(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.create(CONFIG_MAPS, {"metadata": {"name": "theirs"}, "data": {"updated": "0"}})
    sweep(rig.cluster, rig.clock.now + KEPT_S - 10)
    assert len(rig.cluster.list(CONFIG_MAPS)) == 2
    sweep(rig.cluster, rig.clock.now + KEPT_S + 10)
    assert [board["metadata"]["name"] for board in rig.cluster.list(CONFIG_MAPS)] == ["theirs"]


@pytest.mark.parametrize("beat", ["0", "-5", "soon", "1e9", "", f"{10**13}"])
def test_a_sign_of_life_that_cannot_be_one_does_not_keep_a_cluster_for_ever(rig: Rig, beat: str) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT] = beat
    rig.clock.sleep(1700)
    assert reasons(rig) == {}  # it counts from its creation
    rig.clock.sleep(200)
    assert list(reasons(rig)) == [rig.job()]


def test_a_watcher_whose_clock_is_some_minutes_ahead_or_behind_is_alive(rig: Rig) -> None:
    rig.watcher().provision()
    rig.clock.sleep(3600)
    for minutes in (-20, 20):
        beat = f"{rig.clock.now + 60 * minutes:.0f}"
        rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT] = beat
        assert reasons(rig) == {}


def test_a_job_that_cannot_be_asked_about_does_not_keep_the_others(rig: Rig) -> None:
    """The first one's workflow may not be looked at, KFP does not answer for the second one, the third is silent."""
    owned = Owner("kfp-1", OwnerReference(name="flow", uid="uid-of-flow"))
    for name, owner in (("a-owned", owned), ("b-asked", Owner(kfp_run="kfp-2")), ("c-silent", Owner())):
        rig.config, rig.owner = rig.config.model_copy(update={"name": name}), owner
        rig.watcher().provision()
    rig.operator.job("c-silent-a1")["metadata"]["annotations"][HEARTBEAT] = "1000"
    rig.clock.sleep(60)
    rig.operator.job("c-silent-a1")["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    rig.cluster.forbidden = [("get", WORKFLOWS)]

    def is_over(run: str) -> bool:
        raise RunError("no KFP answers")

    reaped = reap(rig.cluster, HALF_AN_HOUR, rig.clock.now, is_over)
    assert next(reaped).name == "c-silent-a1"
    with pytest.raises(ClusterError, match="no permission to get workflows"):
        next(reaped)
    assert rig.left() == ["a-owned-a1", "b-asked-a1"]
