"""The watcher against a stand-in of cluster and operator, with a real store and a clock that only sleeping moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kuberay_rig import Rig

from tidemill.errors import (
    ClusterError,
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    RunError,
    StoreError,
    TidemillError,
)
from tidemill.failure import Failure
from tidemill.kuberay import budget
from tidemill.kuberay.board import ENDED, ENDED_OF, FAILED, STOPPED, close
from tidemill.kuberay.cluster import PODS, RAY_CLUSTERS, RAY_JOBS, Kind, Object, labels_of, name_of
from tidemill.kuberay.fake import FakeCluster, FakeOperator
from tidemill.kuberay.kinds import OwnerReference
from tidemill.kuberay.names import HEARTBEAT, KFP_RUN_LABEL, RUN_LABEL, STOP
from tidemill.kuberay.owner import Owner
from tidemill.kuberay.release import release_run
from tidemill.observe.events import read_events
from tidemill.store.attempt import Attempt
from tidemill.store.object_store import ListedObject, ObjectStore


def with_kubernetes(rig: Rig, **settings: Any) -> None:
    kubernetes = rig.config.kubernetes.model_copy(update=settings)
    rig.config = rig.config.model_copy(update={"kubernetes": kubernetes})


class Killed(BaseException):
    """The watcher's pod is deleted."""


def killed() -> None:
    raise Killed


def test_a_run_is_followed_from_its_start_to_its_summary(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(30, lambda: rig.steps(1, 1, 2))
    rig.clock.after(60, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    shown = rig.screen.getvalue()
    assert "   1/3" in shown
    assert "   2/3" in shown
    assert "starting: 0 of 3 pods ready" in shown


def test_provision_twice_makes_one_job(rig: Rig) -> None:
    assert rig.watcher().provision() == rig.watcher().provision() == 1
    assert rig.made() == [rig.job()]


def test_a_killed_watcher_attaches_and_shows_every_step_once(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    ends: list[int] = []
    rig.clock.after(30, lambda: ends.append(rig.steps(1, 1)))
    rig.clock.after(40, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    rig.clock.after(10, lambda: rig.steps(1, 2, offset=ends[0]))
    rig.clock.after(30, rig.succeeds)
    rig.watcher().follow(first)
    assert rig.cluster.made.count(rig.job()) == 1
    steps = [event.step for event in read_events(rig.config.folder / "events.jsonl") if event.kind == "step_finished"]
    assert steps == [1, 2]


def test_a_run_that_ended_while_nobody_watched_and_is_cleaned_up_has_its_summary(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.leaves()
    rig.cluster.delete(RAY_JOBS, rig.job())
    assert rig.watcher().follow(first).steps == 3
    assert rig.made() == [rig.job()]


def test_what_an_earlier_pipeline_left_is_not_the_result_of_this_one(rig: Rig) -> None:
    rig.leaves(1)
    assert rig.watcher().provision() == 2


def test_the_job_of_an_earlier_pipeline_that_kuberay_keeps_makes_room_for_a_new_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.succeeds()
    assert rig.watcher().provision() == 2
    assert rig.left() == [rig.job(2)]


def test_the_heartbeat_is_fresh_from_creation_to_end(rig: Rig) -> None:
    first = rig.watcher().provision()
    ages: list[float] = []

    def look() -> None:
        ages.append(rig.clock.now - float(rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT]))

    look()
    rig.starts()
    for after in range(10, 200, 7):
        rig.clock.after(after, look)
    rig.clock.after(200, rig.succeeds)
    rig.watcher().follow(first)
    assert len(ages) == 29
    assert max(ages) <= 36


@pytest.mark.parametrize("error", [RunError("rank 3 died"), EngineError("engine 0 is gone")])
def test_a_failure_that_may_pass_is_answered_with_the_next_attempt(rig: Rig, error: TidemillError) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, error))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
    assert rig.cluster.made.count(rig.job(2)) == 1
    assert (RAY_JOBS, rig.job(1)) not in rig.cluster.objects
    assert f"attempt 1 failed, 3 more: {error}" in rig.screen.getvalue()


def test_the_old_attempt_is_gone_before_the_next_one_is_made(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(20, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))

    def finalize() -> None:
        assert rig.job(2) not in rig.cluster.made
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(100, finalize)
    rig.starts(2, after=120)
    rig.clock.after(160, lambda: rig.succeeds(2))
    rig.watcher().follow(first)


def test_a_lost_head_is_answered_within_seconds_though_kuberay_still_says_running(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.operator.lose_head(rig.job()))
    made: list[float] = []
    rig.clock.after(62, lambda: made.append(rig.cluster.made.count(rig.job(2))))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    rig.watcher().follow(first)
    assert made == [1]
    assert "the head pod is gone" in rig.screen.getvalue()


def test_a_failure_that_comes_again_uses_up_the_restarts(rig: Rig) -> None:
    with_kubernetes(rig, max_restarts=1)
    first = rig.watcher().provision()
    for number in (1, 2):
        rig.starts(number, after=60.0 * number)
        rig.clock.after(60.0 * number + 30, lambda number=number: rig.fails(number, RunError(f"lost {number}")))
    with pytest.raises(RunError, match="lost 2"):
        rig.watcher().follow(first)
    assert rig.left() == []
    with pytest.raises(ClusterError, match="lost 2"):
        rig.watcher().follow(first)  # KFP tries the step again
    assert rig.made() == [rig.job(1), rig.job(2)]


def test_a_failure_that_would_come_again_ends_the_run_with_its_traceback(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, DataError("train.jsonl:7 is broken")))
    with pytest.raises(TidemillError, match=r"train\.jsonl:7 is broken") as caught:
        rig.watcher().follow(first)
    assert "in fails" in str(caught.value.__cause__)
    assert not Failure.of("train", caught.value).passing
    assert rig.left() == []


def test_an_unexpected_failure_tells_where_it_came_from(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, KeyError("weights")))
    with pytest.raises(TidemillError, match=r"(?s)KeyError: 'weights'.*kuberay_rig.py"):
        rig.watcher().follow(first)


def test_a_driver_that_dies_without_a_word_is_quoted_from_its_log(rig: Rig) -> None:
    with_kubernetes(rig, max_restarts=0)
    first = rig.watcher().provision()
    rig.starts()

    def die() -> None:
        rig.cluster.logs[f"{rig.job()}-cluster-head"] = "Killed by the kernel"
        rig.operator.fail(rig.job())

    rig.clock.after(50, die)
    with pytest.raises(RunError, match=r"(?s)the driver failed: exit code 1.*Killed by the kernel"):
        rig.watcher().follow(first)


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


def test_a_cluster_without_room_is_given_up_after_the_start_timeout(rig: Rig) -> None:
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
    assert "queued: waits for room in Kueue's queue gpus" in rig.screen.getvalue()


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
    assert rig.cluster.made.count(rig.job()) == 1
    assert rig.job(2) not in rig.cluster.made


def test_the_annotation_stop_reaches_the_driver_and_the_run_ends_well(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    stop = {"metadata": {"annotations": {STOP: "enough learned"}}}
    rig.clock.after(50, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    rig.clock.after(80, rig.succeeds)
    rig.watcher().follow(first)
    assert Attempt(rig.config.name, 1).asked_to_stop(rig.store) == "enough learned"


def test_a_run_that_was_told_to_stop_is_not_tried_again(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    stop = {"metadata": {"annotations": {STOP: "enough"}}}
    rig.clock.after(50, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    rig.clock.after(80, lambda: rig.fails(1, RunError("lost")))
    with pytest.raises(RunError, match="lost"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_a_run_that_waits_for_room_is_deleted_when_it_is_told_to_stop(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    stop = {"metadata": {"annotations": {STOP: "changed my mind"}}}
    rig.clock.after(20, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    with pytest.raises(ClusterError, match="stopped before it began: changed my mind"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_a_deleted_run_stays_deleted_also_when_the_step_is_tried_again(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.cluster.delete(RAY_JOBS, rig.job()))
    for _ in range(2):
        with pytest.raises(ClusterError, match="was deleted from outside"):
            rig.watcher().follow(first)
    assert rig.cluster.made.count(rig.job(2)) == 0
    assert rig.watcher().provision() == 2  # a new pipeline goes on


def test_a_run_whose_cluster_was_reaped_goes_on_when_its_watcher_is_back(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.cluster.delete(RAY_JOBS, rig.job())
    rig.starts(2)
    rig.clock.after(60, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3


def test_a_used_up_budget_ends_the_run_and_says_so(rig: Rig) -> None:
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
    assert "the budget of 1 GPU hours is used up" in rig.screen.getvalue()


def test_a_run_over_budget_that_does_not_end_is_deleted(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=0.1)
    first = rig.watcher().provision()
    rig.starts()
    with pytest.raises(ClusterError, match="did not end within 900 s and was deleted"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_gpu_hours_of_a_run_that_ended_unwatched_go_to_its_end(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(15 + 300, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    rig.clock.after(3600 - 300, rig.succeeds)
    rig.clock.after(3700 - 300, lambda: rig.cluster.delete(RAY_CLUSTERS, f"{rig.job()}-cluster"))
    rig.clock.sleep(7200)
    rig.watcher().follow(first)
    assert budget.load(rig.store, rig.config.name).hours == pytest.approx(2.0, abs=0.02)  # two GPUs for an hour


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
    assert budget.load(rig.store, rig.config.name).hours == pytest.approx(1.0 + 2 * 900 / 3600, abs=0.05)
    with pytest.raises(ClusterError, match="budget of 1 GPU hours"):
        rig.watcher().follow(first)
    with pytest.raises(ClusterError, match="Raise it to go on"):
        rig.watcher().provision()


def test_an_api_server_that_is_away_for_minutes_does_not_end_the_run(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: setattr(rig.cluster, "away", True))
    rig.clock.after(650, lambda: setattr(rig.cluster, "away", False))
    rig.clock.after(700, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    assert rig.screen.getvalue().count("does not answer") == 1


def test_an_api_server_that_stays_away_ends_the_watch_in_the_end(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.clock.after(5, lambda: setattr(rig.cluster, "away", True))
    with pytest.raises(RunError, match="does not answer"):
        rig.watcher().follow(first)


def test_a_lost_permission_ends_the_watch_at_once(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.cluster.forbidden = [("list", PODS)]
    with pytest.raises(ClusterError, match="no permission to list pods"):
        rig.watcher().follow(first)


def test_a_new_pipeline_takes_a_living_run_over(rig: Rig) -> None:
    rig.watcher().provision()
    reference = OwnerReference(name="flow-2", uid="uid-of-flow-2")
    rig.owner = replace(rig.owner, kfp_run="kfp-2", reference=reference)
    rig.watcher().provision()
    metadata = rig.operator.job(rig.job())["metadata"]
    assert metadata["labels"][KFP_RUN_LABEL] == "kfp-2"
    assert [owner["name"] for owner in metadata["ownerReferences"]] == ["flow-2"]


def test_the_job_of_a_pipeline_is_owned_by_its_workflow(rig: Rig) -> None:
    rig.owner = Owner("kfp-1", OwnerReference(name="flow-1", uid="uid-of-flow-1"))
    rig.watcher().provision()
    assert rig.operator.job(rig.job())["metadata"]["ownerReferences"][0]["uid"] == "uid-of-flow-1"


def test_a_cluster_that_does_not_go_away_is_named_beside_the_failure(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(20, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))
    rig.clock.after(50, lambda: rig.fails(1, RewardError("no such function")))
    with pytest.raises(RunError, match=rf"(?s)no such function.*still there 300 s.*rayjobs/{rig.job()}"):
        rig.watcher().follow(first)


def holds_on(rig: Rig, after: float, until: float) -> None:
    """The pods of attempt 1 take until then to end, once it is deleted."""
    rig.clock.after(after, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))

    def finalize() -> None:
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(until, finalize)


def test_a_watcher_that_is_killed_while_a_failed_run_ends_begins_no_other_attempt(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 100)
    rig.clock.after(50, lambda: rig.fails(1, DataError("train.jsonl:7 is broken")))
    rig.clock.after(80, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    with pytest.raises(TidemillError, match="is broken"):
        rig.watcher().follow(first)
    assert rig.made() == [rig.job()]


@pytest.mark.parametrize("facts", [{ENDED: "it was given back", ENDED_OF: ""}, {STOPPED: "enough"}])
def test_a_run_that_is_ended_between_two_attempts_gets_no_other_one(rig: Rig, facts: dict[str, str]) -> None:
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 100)
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    rig.clock.after(80, lambda: close(rig.cluster, rig.config.name, **facts))
    for _ in range(2):  # KFP tries the step again
        with pytest.raises(ClusterError, match=f"no further attempt begins: {next(iter(facts.values()))}"):
            rig.watcher().follow(first)
    assert rig.made() == [rig.job()]
    assert rig.watcher().provision() == 2  # a new pipeline goes on


class Hasty(FakeCluster):
    """A cluster in which a run is given back at the moment in which one of its RayJobs is made."""

    victim = ""

    def create(self, kind: Kind, manifest: Object) -> Object:
        if name_of(manifest) == self.victim:
            close(self, labels_of(manifest)[RUN_LABEL], **{ENDED: "it was given back", ENDED_OF: ""})
        return super().create(kind, manifest)


@pytest.mark.parametrize("victim", [1, 2])
def test_an_attempt_that_begins_while_the_run_is_given_back_does_not_stay(rig: Rig, victim: int) -> None:
    rig.cluster = Hasty(rig.clock)
    rig.operator = FakeOperator(rig.cluster)
    rig.cluster.victim = rig.job(victim)
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    with pytest.raises(ClusterError, match=f"attempt {victim} is deleted: it was given back"):
        rig.watcher().follow(rig.watcher().provision())
    assert rig.left() == []


def test_a_watcher_killed_before_it_saw_that_the_run_was_given_back_ends_the_attempt_when_it_is_back(
    rig: Rig,
) -> None:
    first = rig.watcher().provision()
    rig.attempts.begin(2)
    close(rig.cluster, rig.config.name, **{ENDED: "it was given back", ENDED_OF: ""})
    with pytest.raises(ClusterError, match="attempt 2 is deleted"):
        rig.watcher().follow(first)
    assert rig.job(2) not in rig.left()


def test_the_end_of_an_earlier_pipeline_does_not_concern_the_one_that_took_the_run_over(rig: Rig) -> None:
    rig.owner = replace(rig.owner, kfp_run="new")
    first = rig.watcher().provision()
    close(rig.cluster, rig.config.name, **{ENDED: "it was given back", ENDED_OF: "old"})
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3


def test_a_rayjob_of_somebody_else_is_neither_taken_over_nor_deleted(rig: Rig) -> None:
    theirs = {"metadata": {"name": rig.job(), "labels": {RUN_LABEL: "another"}}, "spec": {}}
    rig.cluster.create(RAY_JOBS, theirs)
    with pytest.raises(ConfigError, match=f"{rig.job()} in namespace tidemill is of something else"):
        rig.watcher().provision()
    assert rig.operator.job(rig.job())["metadata"]["labels"] == {RUN_LABEL: "another"}
    assert "annotations" not in rig.operator.job(rig.job())["metadata"]


def test_a_budget_that_is_used_up_by_pods_that_wait_for_others_ends_the_run_before_it_began(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=0.1)
    first, begin = rig.watcher().provision(), rig.clock.now
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    rig.clock.after(10, lambda: rig.operator.ready(f"{rig.job()}-cluster-trainer-0"))
    taken = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims."
    rig.clock.after(10, lambda: rig.operator.unschedulable(f"{rig.job()}-cluster-rollout-0", taken))
    with pytest.raises(ClusterError, match=r"stopped before it began: the budget of 0\.1 GPU hours is used up"):
        rig.watcher().follow(first)
    assert rig.clock.now - begin == pytest.approx(10 + 360, abs=10)  # one GPU for a tenth of an hour
    assert rig.left() == []


def test_events_that_are_missing_in_the_store_do_not_end_the_watch(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(30, lambda: rig.steps(1, 1))
    rig.clock.after(40, lambda: rig.steps(1, 3, offset=10_000))
    rig.clock.after(60, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    shown = rig.screen.getvalue()
    assert shown.count("lacks the bytes") == 1
    assert "   3/3" in shown


def test_why_provision_begins_nothing_is_noted(rig: Rig) -> None:
    with_kubernetes(rig, gpu_hours=1.0)
    watcher = rig.watcher()
    watcher.meter.holdings["uid"] = budget.Holding(4, 0.0, 3600.0)
    with pytest.raises(ClusterError, match="budget"):
        watcher.provision()
    assert "budget of 1 GPU hours" in rig.watcher().board.facts()["error"]


def test_a_pipeline_that_a_person_tries_again_after_its_end_goes_on_with_new_attempts(rig: Rig) -> None:
    """KFP's Retry: the same pipeline run, whose exit handler gave the run back; what succeeded is not run again."""
    with_kubernetes(rig, max_restarts=0)
    rig.owner = replace(rig.owner, kfp_run="kfp-1")
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    for _ in range(2):
        with pytest.raises(TidemillError, match="lost"):
            rig.watcher().follow(first)
    release_run(rig.cluster, rig.config.name, "kfp-1", rig.clock)
    rig.starts(2)
    rig.clock.after(60, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
    assert rig.made() == [rig.job(1), rig.job(2)]


class AwayStore(ObjectStore):
    """A store that may be away for everything but whether an object is there."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.away = False

    def list(self, prefix: str, after: str = "") -> tuple[ListedObject, ...]:
        if self.away:
            raise StoreError("no S3 answer")
        return super().list(prefix, after)


def test_a_store_that_is_away_keeps_no_watcher_from_its_sign_of_life(rig: Rig) -> None:
    rig.store = store = AwayStore(rig.store)
    first = rig.watcher().provision()
    ages: list[float] = []

    def look() -> None:
        ages.append(rig.clock.now - float(rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT]))

    rig.starts()
    rig.clock.after(50, lambda: setattr(store, "away", True))
    for after in range(100, 650, 50):
        rig.clock.after(after, look)
    rig.clock.after(650, lambda: setattr(store, "away", False))
    rig.clock.after(700, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    assert max(ages) <= 36


@pytest.mark.parametrize("ahead", ["runs", "gone", "succeeded", "given up"])
def test_a_watcher_that_is_slower_than_another_one_follows_it(rig: Rig, ahead: str) -> None:
    """Both saw attempt 1 fail. While this one waits for its pods to end, the other one goes on to attempt 2 and 3."""
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 200)
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))

    def go_ahead() -> None:
        rig.steps(2, 1)
        if ahead == "runs":
            rig.attempts.begin(2)
            rig.operator.admit(rig.job(2))
        elif ahead == "succeeded":
            rig.leaves(2)
        elif ahead == "given up":
            rig.watcher().ending.give_up(Attempt(rig.config.name, 2), ClusterError("no room"))

    rig.clock.after(100, go_ahead)
    last = {"runs": 2, "gone": 3}.get(ahead)
    if last is not None:
        if ahead == "gone":
            rig.starts(3, after=220)
        rig.clock.after(260, lambda: rig.succeeds(last))
    if ahead == "given up":
        with pytest.raises(ClusterError, match="no room"):
            rig.watcher().follow(first)
    else:
        assert rig.watcher().follow(first).steps == 3
    assert rig.made() == [rig.job(1), *([rig.job(last)] if last else [])]


def test_what_another_watcher_took_away_was_not_deleted_from_outside(rig: Rig) -> None:
    """Two watchers: the other one sees first that the head is lost, and takes the attempt away to begin another."""
    first = rig.watcher().provision()
    rig.starts()

    def take_away() -> None:
        rig.watcher().post(**{FAILED: 1})
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(50, take_away)
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
    assert rig.made() == [rig.job(1), rig.job(2)]


def test_what_another_watcher_gave_up_is_given_up_with_its_words(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()

    def give_up() -> None:
        rig.watcher().ending.give_up(Attempt(rig.config.name, 1), ClusterError("no node can hold it"))
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(50, give_up)
    with pytest.raises(ClusterError, match="no node can hold it"):
        rig.watcher().follow(first)
