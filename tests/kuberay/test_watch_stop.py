"""A watched run that is stopped, deleted or released."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import FakeCluster, FakeOperator
from kuberay_rig import Rig, holds_on

from tidemill.config.names import RUN_LABEL, STOP
from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import RAY_JOBS, Kind, Object, labels_of, name_of
from tidemill.kuberay.run_status import ENDED, ENDED_OF, STOPPED, close
from tidemill.store.attempt import Attempt


def test_the_stop_annotation_reaches_the_driver(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    stop = {"metadata": {"annotations": {STOP: "enough learned"}}}
    rig.clock.after(50, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    rig.clock.after(80, rig.succeeds)
    rig.watcher().follow(first)
    assert Attempt(rig.config.name, 1).asked_to_stop(rig.store) == "enough learned"


def test_a_stopped_run_is_not_retried(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    stop = {"metadata": {"annotations": {STOP: "enough"}}}
    rig.clock.after(50, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    rig.clock.after(80, lambda: rig.fails(1, RunError("lost")))
    with pytest.raises(RunError, match="lost"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_a_stopped_run_that_waits_for_room_is_deleted(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.clock.after(2, lambda: rig.operator.admit(rig.job()))
    stop = {"metadata": {"annotations": {STOP: "changed my mind"}}}
    rig.clock.after(20, lambda: rig.cluster.patch(RAY_JOBS, rig.job(), stop))
    with pytest.raises(ClusterError, match="stopped before it started: changed my mind"):
        rig.watcher().follow(first)
    assert rig.left() == []


def test_a_deleted_run_stays_deleted_when_the_step_is_retried(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.cluster.delete(RAY_JOBS, rig.job()))
    for _ in range(2):
        with pytest.raises(ClusterError, match="was deleted from outside"):
            rig.watcher().follow(first)
    assert rig.cluster.created.count(rig.job(2)) == 0
    assert rig.watcher().provision() == 2  # a new pipeline continues


def test_a_reaped_run_continues_when_its_watcher_is_back(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.cluster.delete(RAY_JOBS, rig.job())
    rig.starts(2)
    rig.clock.after(60, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3


@pytest.mark.parametrize("facts", [{ENDED: "it was released", ENDED_OF: ""}, {STOPPED: "enough"}])
def test_a_run_that_is_ended_between_two_attempts_starts_no_other_attempt(rig: Rig, facts: dict[str, str]) -> None:
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 100)
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    rig.clock.after(80, lambda: close(rig.cluster, rig.config.name, **facts))
    for _ in range(2):  # KFP retries the step
        with pytest.raises(ClusterError, match=f"no further attempt starts: {next(iter(facts.values()))}"):
            rig.watcher().follow(first)
    assert rig.created() == [rig.job()]
    assert rig.watcher().provision() == 2  # a new pipeline continues


class Hasty(FakeCluster):
    """A cluster in which a run is released at the moment one of its RayJobs is created."""

    victim = ""

    def create(self, kind: Kind, manifest: Object) -> Object:
        if name_of(manifest) == self.victim:
            close(self, labels_of(manifest)[RUN_LABEL], **{ENDED: "it was released", ENDED_OF: ""})
        return super().create(kind, manifest)


@pytest.mark.parametrize("victim", [1, 2])
def test_an_attempt_that_is_created_during_a_release_is_deleted(rig: Rig, victim: int) -> None:
    rig.cluster = Hasty(rig.clock)
    rig.operator = FakeOperator(rig.cluster)
    rig.cluster.victim = rig.job(victim)
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    with pytest.raises(ClusterError, match=f"attempt {victim} is deleted: it was released"):
        rig.watcher().follow(rig.watcher().provision())
    assert rig.left() == []


def test_a_restarted_watcher_deletes_the_attempt_of_a_released_run(
    rig: Rig,
) -> None:
    first = rig.watcher().provision()
    rig.attempts.create(2)
    close(rig.cluster, rig.config.name, **{ENDED: "it was released", ENDED_OF: ""})
    with pytest.raises(ClusterError, match="attempt 2 is deleted"):
        rig.watcher().follow(first)
    assert rig.job(2) not in rig.left()


def test_the_end_of_an_earlier_pipeline_does_not_end_an_adopted_run(rig: Rig) -> None:
    rig.owner = replace(rig.owner, kfp_run="new")
    first = rig.watcher().provision()
    close(rig.cluster, rig.config.name, **{ENDED: "it was released", ENDED_OF: "old"})
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
