"""The watcher with a fake cluster and operator, a real store, and a clock that only `sleep` advances."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from kuberay_rig import SUMMARY, Killed, Rig, killed, with_kubernetes

from tidemill.config.names import HEARTBEAT, KFP_RUN_LABEL, RUN_LABEL
from tidemill.errors import ClusterError, ConfigError, RunError, StoreError, TidemillError
from tidemill.kuberay.cluster import PODS, RAY_CLUSTERS, RAY_JOBS
from tidemill.kuberay.release import release_run
from tidemill.kuberay.run_status import Owner, owner_reference
from tidemill.observe.events import read_events
from tidemill.store.object_store import ListedObject, ObjectStore


def test_a_run_is_followed_from_its_start_to_its_summary(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(30, lambda: rig.steps(1, 1, 2))
    rig.clock.after(60, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    shown = rig.output.getvalue()
    assert "   1/3" in shown
    assert "   2/3" in shown
    assert "starting: 0 of 3 pods ready" in shown


def test_a_second_provision_attaches_to_the_first(rig: Rig) -> None:
    assert rig.watcher().provision() == rig.watcher().provision() == 1
    assert rig.created() == [rig.job()]


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
    assert rig.cluster.created.count(rig.job()) == 1
    steps = [event.step for event in read_events(rig.config.folder / "events.jsonl") if event.kind == "step_finished"]
    assert steps == [1, 2]


def test_total_time_is_that_of_all_attempts_without_the_pauses(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(600, lambda: rig.fails(1, RunError("the head pod is lost")))
    rig.starts(2, after=620)
    rig.clock.after(700, lambda: rig.fails(2, ConfigError("data.train", "x", "y", "z")))
    with pytest.raises(TidemillError, match=r"data\.train"):
        rig.watcher().follow(first)
    rig.clock.sleep(10_000)  # until the user continues the run
    third = rig.watcher().provision()
    rig.starts(3)
    rig.clock.after(300, lambda: rig.succeeds(3))
    assert 900 < rig.watcher().follow(third).total_seconds < 1010


def test_the_number_of_engines_is_left_to_the_autoscaler(rig: Rig) -> None:
    """kuberay#532: a client that writes `replicas` deletes the engines that the autoscaler created."""
    with_kubernetes(rig, max_engines=4)
    first = rig.watcher().provision()
    rig.starts()
    scaled = {"replicas": 4, "scaleStrategy": {"workersToDelete": ["pod-7"]}}

    def scale() -> None:
        ray = rig.operator.cluster.objects[RAY_CLUSTERS, f"{rig.job()}-cluster"]
        ray["spec"] = copy.deepcopy(rig.operator.job(rig.job())["spec"]["rayClusterSpec"])
        ray["spec"]["workerGroupSpecs"][1] |= scaled

    rig.clock.after(20, scale)
    rig.clock.after(40, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    made = copy.deepcopy(rig.operator.job(rig.job())["spec"])
    rig.owner = Owner("kfp-2", owner_reference("flow-2", "uid-of-flow-2"))
    rig.config = rig.config.model_copy(update={"rollout": rig.config.rollout.model_copy(update={"engines": 2})})
    assert rig.watcher().provision() == first, "the next pipeline run adopts it"
    rig.clock.after(40, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    [ray] = rig.cluster.list(RAY_CLUSTERS)
    assert {key: ray["spec"]["workerGroupSpecs"][1][key] for key in scaled} == scaled
    assert rig.operator.job(rig.job())["spec"] == made


@pytest.mark.parametrize("forbidden", [False, True])
def test_a_run_that_has_its_results_gives_its_cluster_back(rig: Rig, forbidden: bool) -> None:
    """No exit handler runs after KFP's Retry; without the permission the cluster stays for its time to live."""
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(60, rig.succeeds)
    rig.cluster.forbidden = [("delete", RAY_JOBS)] if forbidden else []
    assert rig.watcher().follow(first).steps == SUMMARY.steps
    assert (rig.left() == []) is not forbidden
    said = "the cluster stays for 300 s after its end, because: no permission to delete rayjobs.ray.io"
    assert (said in rig.output.getvalue()) is forbidden
    assert (rig.status.fields()["phase"], rig.status.closed()) == ("succeeded", None)
    assert rig.watcher().follow(first).steps == SUMMARY.steps, "the step is repeated"
    assert rig.created() == [rig.job()]


def test_steps_that_are_retried_after_the_exit_handler_leave_no_cluster(rig: Rig) -> None:
    """The exit handler does not run again."""
    rig.owner = Owner("kfp-1")
    first = rig.watcher().provision()
    release_run(rig.cluster, rig.config.name, "kfp-1", rig.clock)
    rig.starts()
    rig.clock.after(60, rig.succeeds)
    rig.watcher().follow(first)
    assert rig.left() == []


def test_a_run_that_ended_and_was_deleted_without_a_watcher_has_its_summary(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.leaves()
    rig.cluster.delete(RAY_JOBS, rig.job())
    assert rig.watcher().follow(first).steps == 3
    assert rig.created() == [rig.job()]


def test_results_of_an_earlier_pipeline_do_not_count(rig: Rig) -> None:
    rig.leaves(1)
    assert rig.watcher().provision() == 2


def test_an_ended_rayjob_of_an_earlier_pipeline_is_replaced(rig: Rig) -> None:
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


def test_an_api_server_that_is_away_for_minutes_does_not_end_the_run(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: setattr(rig.cluster, "away", True))
    rig.clock.after(650, lambda: setattr(rig.cluster, "away", False))
    rig.clock.after(700, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    assert rig.output.getvalue().count("does not answer") == 1


def test_an_api_server_that_stays_away_ends_the_watch(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.clock.after(5, lambda: setattr(rig.cluster, "away", True))
    with pytest.raises(RunError, match="does not answer"):
        rig.watcher().follow(first)


def test_a_lost_permission_ends_the_watch_at_once(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.cluster.forbidden = [("list", PODS)]
    with pytest.raises(ClusterError, match="no permission to list pods"):
        rig.watcher().follow(first)


def test_a_new_pipeline_adopts_a_running_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    reference = owner_reference("flow-2", "uid-of-flow-2")
    rig.owner = replace(rig.owner, kfp_run="kfp-2", reference=reference)
    rig.watcher().provision()
    metadata = rig.operator.job(rig.job())["metadata"]
    assert metadata["labels"][KFP_RUN_LABEL] == "kfp-2"
    assert [owner["name"] for owner in metadata["ownerReferences"]] == ["flow-2"]


def test_the_job_of_a_pipeline_is_owned_by_its_workflow(rig: Rig) -> None:
    rig.owner = Owner("kfp-1", owner_reference("flow-1", "uid-of-flow-1"))
    rig.watcher().provision()
    assert rig.operator.job(rig.job())["metadata"]["ownerReferences"][0]["uid"] == "uid-of-flow-1"


def test_a_foreign_rayjob_is_neither_adopted_nor_deleted(rig: Rig) -> None:
    theirs = {"metadata": {"name": rig.job(), "labels": {RUN_LABEL: "another"}}, "spec": {}}
    rig.cluster.create(RAY_JOBS, theirs)
    with pytest.raises(ConfigError, match=f"{rig.job()} in namespace tidemill belongs to something else"):
        rig.watcher().provision()
    assert rig.operator.job(rig.job())["metadata"]["labels"] == {RUN_LABEL: "another"}
    assert "annotations" not in rig.operator.job(rig.job())["metadata"]


def test_a_gap_in_the_events_does_not_end_the_watch(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(30, lambda: rig.steps(1, 1))
    rig.clock.after(40, lambda: rig.steps(1, 3, offset=10_000))
    rig.clock.after(60, rig.succeeds)
    assert rig.watcher().follow(first).steps == 3
    shown = rig.output.getvalue()
    assert shown.count("lacks the bytes") == 1
    assert "   3/3" in shown


class AwayStore(ObjectStore):
    """A store that can be unreachable for all requests except `exists`."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store.client, store.endpoint, store.bucket)
        self.away = False

    def list(self, prefix: str, after: str = "") -> tuple[ListedObject, ...]:
        if self.away:
            raise StoreError("no S3 answer")
        return super().list(prefix, after)


def test_the_heartbeat_goes_on_while_the_store_is_away(rig: Rig) -> None:
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
