"""A run on a real cluster with the real operator, from its start to its end, and what may come between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster_rig import Bench

from tidemill.config.names import HEARTBEAT, STOP, selector
from tidemill.errors import ClusterError, RunError, TidemillError
from tidemill.kuberay.attempts import WallClock
from tidemill.kuberay.cluster import PODS, RAY_CLUSTERS, RAY_JOBS, Kind, labels_of, name_of
from tidemill.kuberay.release import release_run
from tidemill.kuberay.state import NODE_TYPE
from tidemill.observe.events import read_events
from tidemill.store.attempt import Attempt

pytestmark = pytest.mark.cluster


def steps_of(bench: Bench) -> list[int]:
    """Steps in the log of the pipeline's step."""
    return [event.step for event in read_events(bench.config.folder / "events.jsonl") if event.kind == "step_finished"]


def test_a_run_is_made_and_followed_and_its_cluster_goes_after_its_time_to_live(bench: Bench) -> None:
    assert bench.provision() == bench.provision() == 1
    assert bench.follow().steps == 3
    output = bench.output.getvalue()
    assert "   3/3" in output
    (submitter,) = (pod for pod in bench.pods() if NODE_TYPE not in labels_of(pod))
    assert "   3/3" in bench.admin.log(name_of(submitter))  # what `tidemill logs` shows
    assert "placed on" in output
    assert b"0.75" in bench.store.get_bytes(Attempt(bench.name, 1).evaluation)
    bench.until(lambda: not any(NODE_TYPE in labels_of(pod) for pod in bench.pods()))  # keep_s = 0
    assert bench.admin.list(RAY_CLUSTERS, selector(bench.name)) == []
    assert bench.follow().steps == 3  # a step that is tried again finds the result
    assert release_run(bench.steps, bench.name, None, WallClock())
    assert bench.left() == []


def test_a_watcher_that_is_started_again_attaches_and_a_stop_ends_the_run_well(bench: Bench) -> None:
    bench.trainer_steps = 500
    bench.provision()
    with bench.followed() as first:
        bench.until_shown("   2/500")
        bench.admin.patch(RAY_JOBS, bench.job(), {"metadata": {"annotations": {STOP: "enough learned"}}})
        again = bench.follow()
        assert first.result(240) == again
    assert 2 <= again.steps < 500
    assert again.missing == {"steps": "enough learned"}
    assert max(steps_of(bench)) == again.steps


def head_of(bench: Bench) -> str:
    return next(name_of(pod) for pod in bench.pods() if labels_of(pod).get(NODE_TYPE) == "head")


def submitter_of(bench: Bench) -> str:
    return next(name_of(pod) for pod in bench.pods() if NODE_TYPE not in labels_of(pod))


def cluster_of(bench: Bench) -> str:
    return str(bench.status()["rayClusterName"])


@pytest.mark.parametrize(
    ("kind", "victim"),
    [(PODS, head_of), (PODS, submitter_of), (RAY_CLUSTERS, cluster_of)],
    ids=["head", "submitter", "cluster"],
)
def test_what_is_lost_is_answered_with_an_attempt_that_goes_on(
    bench: Bench, kind: Kind, victim: Callable[[Bench], str]
) -> None:
    """The driver hears of it in time, and commits first."""
    bench.kubernetes, bench.trainer_steps = {"max_restarts": 1}, 12
    bench.env |= {"STUB_HOLD": "6"}
    bench.provision()
    with bench.followed() as watched:
        bench.until_shown("   3/12")
        bench.admin.delete(kind, victim(bench))
        summary = watched.result(480)
    assert summary.steps == 12
    assert "attempt 1 failed, 1 more: the driver was told to end; s3://" in bench.output.getvalue()
    steps = steps_of(bench)
    assert steps == sorted(set(steps))  # attempt 2 went on from the commit
    assert steps[-1] == 12
    assert bench.status(1) == {}


def test_a_failed_driver_is_told_with_its_traceback_and_nothing_stays(bench: Bench) -> None:
    bench.env |= {"STUB_ERROR": "DataError", "STUB_ERROR_AT": "1"}
    bench.provision()
    with pytest.raises(TidemillError, match="the stand-in was told to fail") as caught:
        bench.follow()
    assert "in train" in str(caught.value.__cause__)
    assert bench.left() == []


def test_teardown_ends_a_run_whatever_it_does(bench: Bench) -> None:
    bench.trainer_steps = 500
    bench.provision()
    with bench.followed() as watched:
        bench.until_shown("   1/500")
        assert float(bench.admin.get(RAY_JOBS, bench.job())["metadata"]["annotations"][HEARTBEAT]) > 0
        assert release_run(bench.steps, bench.name, None, WallClock())
        assert bench.left() == []
        with pytest.raises((ClusterError, RunError)):
            watched.result(480)


def test_teardown_between_two_attempts_leaves_nothing_and_no_other_attempt_begins(bench: Bench) -> None:
    bench.kubernetes, bench.trainer_steps = {"max_restarts": 1}, 500
    bench.provision()
    with bench.followed() as watched:
        bench.until_shown("   1/500")
        bench.admin.delete(PODS, head_of(bench))
        bench.until_shown("attempt 1 failed")
        assert release_run(bench.steps, bench.name, None, WallClock())
        with pytest.raises(ClusterError):
            watched.result(480)
    assert bench.left() == []
    with pytest.raises(ClusterError):
        bench.follow()  # the step is tried again
    assert bench.left() == []


def test_a_used_up_budget_ends_the_run_with_a_checkpoint(bench: Bench) -> None:
    bench.trainer_steps = 500
    bench.provision()
    bench.until(lambda: bench.status().get("jobStatus") == "RUNNING")
    bench.kubernetes = {"gpu_hours": 0.001}  # only who watches has to know
    summary = bench.follow()
    assert "the budget of 0.001 GPU hours is used up" in summary.missing["steps"]
    assert summary.steps < 500
