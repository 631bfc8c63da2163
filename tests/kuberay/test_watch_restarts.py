"""The reaction of the watcher to a failure: the next attempt, or the end of the run with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kuberay_rig import Killed, Rig, holds_on, killed, with_kubernetes

from tidemill.driver.failure import Failure
from tidemill.errors import ClusterError, DataError, EngineError, RewardError, RunError, TidemillError
from tidemill.kuberay.cluster import RAY_JOBS
from tidemill.kuberay.release import release_run


@pytest.mark.parametrize("error", [RunError("rank 3 died"), EngineError("engine 0 is gone")])
def test_a_retryable_failure_starts_the_next_attempt(rig: Rig, error: TidemillError) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, error))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
    assert rig.cluster.created.count(rig.job(2)) == 1
    assert (RAY_JOBS, rig.job(1)) not in rig.cluster.objects
    assert f"attempt 1 failed, 3 more: {error}" in rig.output.getvalue()


def test_the_old_attempt_is_gone_before_the_next_one_is_created(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(20, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))

    def finalize() -> None:
        assert rig.job(2) not in rig.cluster.created
        del rig.operator.job(rig.job())["metadata"]["finalizers"]
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(100, finalize)
    rig.starts(2, after=120)
    rig.clock.after(160, lambda: rig.succeeds(2))
    rig.watcher().follow(first)


def test_a_lost_head_starts_the_next_attempt_while_kuberay_still_reports_running(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.operator.lose_head(rig.job()))
    made: list[float] = []
    rig.clock.after(62, lambda: made.append(rig.cluster.created.count(rig.job(2))))
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    rig.watcher().follow(first)
    assert made == [1]
    assert "the head pod is gone" in rig.output.getvalue()


def test_a_repeated_failure_uses_up_the_restarts(rig: Rig) -> None:
    with_kubernetes(rig, max_restarts=1)
    first = rig.watcher().provision()
    for number in (1, 2):
        rig.starts(number, after=60.0 * number)
        rig.clock.after(60.0 * number + 30, lambda number=number: rig.fails(number, RunError(f"lost {number}")))
    with pytest.raises(RunError, match="lost 2"):
        rig.watcher().follow(first)
    assert rig.left() == []
    with pytest.raises(ClusterError, match="lost 2"):
        rig.watcher().follow(first)  # KFP retries the step
    assert rig.created() == [rig.job(1), rig.job(2)]


def test_a_permanent_failure_ends_the_run_with_its_traceback(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, DataError("train.jsonl:7 is broken")))
    with pytest.raises(TidemillError, match=r"train\.jsonl:7 is broken") as caught:
        rig.watcher().follow(first)
    assert "in fails" in str(caught.value.__cause__)
    assert not Failure.of("train", caught.value).retryable
    assert rig.left() == []


def test_an_unexpected_failure_tells_where_it_came_from(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, KeyError("weights")))
    with pytest.raises(TidemillError, match=r"(?s)KeyError: 'weights'.*kuberay_rig.py"):
        rig.watcher().follow(first)


def test_a_driver_that_dies_without_a_failure_record_is_quoted_from_its_log(rig: Rig) -> None:
    with_kubernetes(rig, max_restarts=0)
    first = rig.watcher().provision()
    rig.starts()

    def die() -> None:
        rig.cluster.logs[f"{rig.job()}-cluster-head"] = "Killed by the kernel"
        rig.operator.fail(rig.job())

    rig.clock.after(50, die)
    with pytest.raises(RunError, match=r"(?s)the driver failed: exit code 1.*Killed by the kernel"):
        rig.watcher().follow(first)


def test_a_cluster_that_is_not_removed_is_named_after_the_failure(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(20, lambda: rig.operator.job(rig.job())["metadata"].update(finalizers=["ray.io/rayjob"]))
    rig.clock.after(50, lambda: rig.fails(1, RewardError("no such function")))
    with pytest.raises(RunError, match=rf"(?s)no such function.*rayjobs/{rig.job()}.* still exist 300 s"):
        rig.watcher().follow(first)


def test_a_watcher_killed_during_the_removal_starts_no_other_attempt(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 100)
    rig.clock.after(50, lambda: rig.fails(1, DataError("train.jsonl:7 is broken")))
    rig.clock.after(80, killed)
    with pytest.raises(Killed):
        rig.watcher().follow(first)
    with pytest.raises(TidemillError, match="is broken"):
        rig.watcher().follow(first)
    assert rig.created() == [rig.job()]


def test_a_pipeline_that_a_user_retries_after_its_end_starts_new_attempts(rig: Rig) -> None:
    """KFP's retry of a pipeline run whose exit handler has released the run; steps that succeeded are not repeated."""
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
    assert rig.created() == [rig.job(1), rig.job(2)]
