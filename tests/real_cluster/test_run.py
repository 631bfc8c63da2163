"""A run on a real cluster with the real operator, from its start to its end, and its faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster_rig import ClusterRun

from tidemill.config.names import HEARTBEAT, STOP
from tidemill.errors import ClusterError, RunError, TidemillError
from tidemill.kuberay.cluster import PODS, RAY_CLUSTERS, RAY_JOBS, Kind, labels_of, name_of
from tidemill.kuberay.job_state import NODE_TYPE
from tidemill.kuberay.release import release_run
from tidemill.observe.events import read_events
from tidemill.store.attempt import Attempt

pytestmark = pytest.mark.cluster


def steps_of(run: ClusterRun) -> list[int]:
    """Training steps in the event log of the pipeline step."""
    return [event.step for event in read_events(run.config.folder / "events.jsonl") if event.kind == "step_finished"]


def test_a_run_succeeds_and_its_cluster_is_deleted_at_its_end(run: ClusterRun) -> None:
    run.trainer_steps = 10
    assert run.provision() == run.provision() == 1
    with run.followed() as watched:
        run.until_shown("   2/10")
        (submitter,) = (pod for pod in run.pods() if NODE_TYPE not in labels_of(pod))
        assert "   1/10" in run.admin.log(name_of(submitter))  # the output of `tidemill logs`
        assert watched.result(240).steps == 10
    output = run.output.getvalue()
    assert "  10/10" in output
    assert "placed on" in output
    assert b"0.75" in run.store.get_bytes(Attempt(run.name, 1).evaluation)
    run.until(lambda: not run.left())
    assert run.follow().steps == 10  # a repeated step finds the result
    assert release_run(run.steps, run.name, None, time)
    assert run.left() == []


def test_a_restarted_watcher_attaches_and_a_stop_ends_the_run(run: ClusterRun) -> None:
    run.trainer_steps = 500
    run.provision()
    with run.followed() as first:
        run.until_shown("   2/500")
        run.admin.patch(RAY_JOBS, run.job(), {"metadata": {"annotations": {STOP: "enough learned"}}})
        again = run.follow()
        assert replace(first.result(240), total_seconds=again.total_seconds) == again  # each watcher saw the end itself
    assert 2 <= again.steps < 500
    assert again.missing == {"steps": "enough learned"}
    assert max(steps_of(run)) == again.steps


def head_of(run: ClusterRun) -> str:
    return next(name_of(pod) for pod in run.pods() if labels_of(pod).get(NODE_TYPE) == "head")


def submitter_of(run: ClusterRun) -> str:
    return next(name_of(pod) for pod in run.pods() if NODE_TYPE not in labels_of(pod))


def cluster_of(run: ClusterRun) -> str:
    return str(run.status()["rayClusterName"])


@pytest.mark.parametrize(
    ("kind", "victim"),
    [(PODS, head_of), (PODS, submitter_of), (RAY_CLUSTERS, cluster_of)],
    ids=["head", "submitter", "cluster"],
)
def test_a_lost_part_starts_an_attempt_that_continues(
    run: ClusterRun, kind: Kind, victim: Callable[[ClusterRun], str]
) -> None:
    """The driver receives SIGTERM in time, and commits first."""
    run.kubernetes, run.trainer_steps = {"max_restarts": 1}, 12
    run.env |= {"STUB_HOLD": "6"}
    run.provision()
    with run.followed() as watched:
        run.until_shown("   3/12")
        run.admin.delete(kind, victim(run))
        summary = watched.result(480)
    assert summary.steps == 12
    assert "attempt 1 failed, 1 more: the driver was terminated after " in run.output.getvalue()
    steps = steps_of(run)
    assert steps == sorted(set(steps))  # attempt 2 continued from the commit
    assert steps[-1] == 12
    assert run.status(1) == {}


def test_a_failed_driver_ends_the_run_with_its_traceback(run: ClusterRun) -> None:
    run.env |= {"STUB_ERROR": "DataError", "STUB_ERROR_AT": "1"}
    run.provision()
    with pytest.raises(TidemillError, match="the stub was told to fail") as caught:
        run.follow()
    assert "in train" in str(caught.value.__cause__)
    assert run.left() == []


def test_teardown_ends_a_running_run(run: ClusterRun) -> None:
    run.trainer_steps = 500
    run.provision()
    with run.followed() as watched:
        run.until_shown("   1/500")
        assert float(run.admin.get(RAY_JOBS, run.job())["metadata"]["annotations"][HEARTBEAT]) > 0
        assert release_run(run.steps, run.name, None, time)
        assert run.left() == []
        with pytest.raises((ClusterError, RunError)):
            watched.result(480)


def test_teardown_between_two_attempts_starts_no_other_attempt(run: ClusterRun) -> None:
    run.kubernetes, run.trainer_steps = {"max_restarts": 1}, 500
    run.provision()
    with run.followed() as watched:
        run.until_shown("   1/500")
        run.admin.delete(PODS, head_of(run))
        run.until_shown("attempt 1 failed")
        assert release_run(run.steps, run.name, None, time)
        with pytest.raises(ClusterError):
            watched.result(480)
    assert run.left() == []
    with pytest.raises(ClusterError):
        run.follow()  # the step is retried
    assert run.left() == []


def test_a_used_up_budget_ends_a_real_run(run: ClusterRun) -> None:
    run.trainer_steps = 500
    run.provision()
    run.until(lambda: run.status().get("jobStatus") == "RUNNING")
    run.kubernetes = {"gpu_hours": 0.001}  # only the watcher reads it
    summary = run.follow()
    assert "the budget of 0.001 GPU hours is used up" in summary.missing["steps"]
    assert summary.steps < 500
