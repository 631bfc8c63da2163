"""status, logs, stop and reap against the stand-in of a cluster."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kuberay_rig import Rig

from tidemill.cli import remote
from tidemill.config.names import HEARTBEAT, STOP, attempt_of
from tidemill.errors import ClusterError, ConfigError, RewardError, RunError
from tidemill.kuberay.cluster import CONFIG_MAPS, PODS, RAY_JOBS
from tidemill.kuberay.release import release_run
from tidemill.kuberay.status import look


def said(rig: Rig, command: Callable[..., int], *arguments: str, **options: Any) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        assert command(rig.cluster, *arguments, **options) == 0
    return screen.getvalue()


def stopped(rig: Rig, run: str | None = None, *, reason: str = "enough", now: bool = False) -> str:
    """What `tidemill stop` prints."""
    return said(rig, remote.stop, rig.config.name if run is None else run, reason=reason, now=now)


def reaped(rig: Rig, kfp: str | None = None, *, dry_run: bool = False) -> str:
    """What `tidemill reap` prints."""
    return said(rig, remote.reap_runs, older_than_min=30, kfp=kfp, dry_run=dry_run)


def lines(rig: Rig) -> str:
    """What status says of the run, at the time of the stand-in."""
    (status,) = look(rig.cluster, rig.config.name, rig.clock.now)
    return "\n".join(status.lines())


def submitter(rig: Rig, number: int = 1) -> str:
    """The pod that follows the driver of an attempt."""
    labels = dict(rig.operator.job(rig.job(number))["metadata"]["labels"])
    assert attempt_of(labels) == number
    name = f"{rig.job(number)}-submit"
    rig.operator.own(PODS, name, rig.operator.job(rig.job(number)), {"metadata": {"labels": labels}, "spec": {}})
    rig.operator.pod(name)["status"] = {"phase": "Running"}
    return name


def test_status_shows_phase_step_gpus_and_links(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    shown: list[str] = []
    rig.clock.after(30, lambda: rig.steps(1, 1, 2))
    rig.clock.after(80, lambda: shown.append(lines(rig)))
    rig.clock.after(90, rig.succeeds)
    rig.watcher().follow(first)
    (during,) = shown
    assert during.startswith(f"{rig.config.name}  running  step 2/3  attempt 1  2 GPUs held  0.0")
    assert "Ray dashboard: " in during and "End it: " in during
    assert lines(rig).startswith(f"{rig.config.name}  succeeded  step 3/3")


def test_status_of_an_ended_run_offers_only_what_is_still_there(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.succeeds()
    kept = lines(rig)  # its watcher has not seen the end
    assert "Ray dashboard: " in kept and "MLflow: " in kept and "End it" not in kept
    rig.watcher().follow(first)
    gone = lines(rig)
    assert "MLflow: " in gone and "Store: " in gone
    assert "Ray dashboard" not in gone and "End it" not in gone


def test_status_shows_what_pods_wait_for(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.waiting(f"{rig.job()}-cluster-head", "ErrImagePull", "not found")
    assert "starting: 0 of 3 pods ready" in lines(rig)
    assert f"pod {rig.job()}-cluster-head waits: ErrImagePull: not found" in lines(rig)
    rig.clock.sleep(60)
    assert "cannot pull its image" in lines(rig)


def test_status_tells_why_a_run_failed_when_its_cluster_is_gone(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()
    rig.clock.after(50, lambda: rig.fails(1, RunError("rank 3 died")))
    rig.starts(2, after=80)
    rig.clock.after(130, lambda: rig.fails(2, RewardError("no such function")))
    with pytest.raises(Exception, match="no such function"):
        rig.watcher().follow(first)
    assert rig.left() == []
    told = lines(rig)
    assert told.startswith(f"{rig.config.name}  failed")
    assert "\n  no such function\n" in told
    assert "before: attempt 1: rank 3 died" in told


def test_status_warns_of_a_run_that_nobody_watches(rig: Rig) -> None:
    rig.watcher().provision()
    rig.clock.sleep(1200)
    assert "its watcher has been silent for 20 min" in lines(rig)


def test_status_all_lists_runs_and_says_when_there_is_none(rig: Rig) -> None:
    assert said(rig, remote.status, "all") == "no runs in namespace tidemill\n"
    rig.watcher().provision()
    assert rig.config.name in said(rig, remote.status, "all")


@pytest.mark.parametrize(
    ("command", "options"),
    [(remote.status, {}), (remote.stop, {"reason": "enough", "now": False}), (remote.logs, {"follow": True})],
)
def test_a_run_that_is_not_there_is_refused_with_those_that_are(
    rig: Rig, command: Callable[..., int], options: dict[str, Any]
) -> None:
    rig.watcher().provision()
    with pytest.raises(ConfigError, match=f"a run of namespace tidemill: {rig.config.name}"):
        said(rig, command, "x", **options)


def test_an_empty_name_is_not_that_of_all_runs(rig: Rig) -> None:
    rig.watcher().provision()
    for now in (False, True):
        with pytest.raises(ConfigError, match="RUN = ''"):
            stopped(rig, "", now=now)
    with pytest.raises(ConfigError, match="RUN = ''"):
        said(rig, remote.status, "")
    assert rig.left() == [rig.job()]
    assert STOP not in rig.operator.job(rig.job())["metadata"]["annotations"]


def test_stop_marks_the_newest_attempt_and_keeps_the_first_reason(rig: Rig) -> None:
    rig.watcher().provision()
    stopped(rig)
    stopped(rig, reason="another")
    assert rig.operator.job(rig.job())["metadata"]["annotations"][STOP] == "enough"


def test_stop_now_deletes_the_cluster(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    assert "is deleted" in stopped(rig, now=True)
    assert rig.left() == []


def test_stop_of_a_run_that_is_over_says_so_and_marks_nothing(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.succeeds()
    assert f"{rig.config.name} is over: succeeded; `--now`" in stopped(rig)
    assert STOP not in rig.operator.job(rig.job())["metadata"].get("annotations", {})
    rig.watcher().follow(first)
    assert stopped(rig) == f"{rig.config.name} is over: succeeded\n"


def test_logs_are_those_of_the_newest_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    assert "has no log yet" in said(rig, remote.logs, rig.config.name, follow=False)
    rig.cluster.logs[submitter(rig)] = "one\n[two]\n"
    assert said(rig, remote.logs, rig.config.name, follow=False) == "one\n[two]\n"


def test_logs_of_a_run_that_is_gone_say_where_they_are(rig: Rig) -> None:
    rig.watcher().provision()
    stopped(rig, now=True)
    with pytest.raises(RunError, match="its log is in the object store"):
        said(rig, remote.logs, rig.config.name, follow=False)


def test_reap_tells_what_and_why(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["annotations"] = {"tidemill.dev/heartbeat": "32503680000"}
    assert reaped(rig) == "nothing to delete in namespace tidemill\n"
    rig.operator.job(rig.job())["metadata"]["annotations"] = {"tidemill.dev/heartbeat": "1000000000"}
    assert f"would delete {rig.job()}: its watcher has written no heartbeat" in reaped(rig, dry_run=True)
    assert f"deleted {rig.job()}: its watcher has written no heartbeat" in reaped(rig)
    assert rig.left() == []


def test_stop_reaches_a_run_that_is_between_two_attempts(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.delete(RAY_JOBS, rig.job())
    assert "ends after the current step" in stopped(rig)
    assert rig.status.closed() == "enough"


def test_stop_without_the_right_to_note_it_is_refused_only_where_there_is_no_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    rig.cluster.forbidden = [("patch", CONFIG_MAPS)]
    stopped(rig)
    assert rig.operator.job(rig.job())["metadata"]["annotations"][STOP] == "enough"
    rig.cluster.delete(RAY_JOBS, rig.job())
    with pytest.raises(ClusterError, match="between two attempts"):
        stopped(rig)


def test_stop_of_a_run_that_failed_and_is_tried_again_is_for_the_next_attempt(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.fail(rig.job())
    stopped(rig)
    assert rig.status.closed() == "enough"


def test_stop_of_a_run_that_nobody_saw_end_says_so_and_changes_nothing(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.admit(rig.job())
    rig.operator.succeed(rig.job())
    assert f"{rig.config.name} is over: succeeded; `--now`" in stopped(rig)
    rig.cluster.delete(RAY_JOBS, rig.job())
    rig.status.fail(RunError("lost"))
    assert stopped(rig) == f"{rig.config.name} is over: failed\n"
    assert rig.status.closed() is None


def test_stop_of_a_run_that_nobody_watches_says_who_hears_of_it(rig: Rig) -> None:
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["annotations"][HEARTBEAT] = "1000000000"
    assert "nobody watches it:" in stopped(rig)
    assert rig.operator.job(rig.job())["metadata"]["annotations"][STOP]


def test_status_of_a_run_that_was_given_back_while_it_went_on_says_that(rig: Rig) -> None:
    rig.watcher().provision()
    release_run(rig.cluster, rig.config.name, None, rig.clock)
    assert lines(rig).startswith(f"{rig.config.name}  ended: the run was released, for example by")


def test_reap_without_kfp_still_deletes_what_is_silent(rig: Rig) -> None:
    rig.owner = replace(rig.owner, kfp_run="kfp-1")
    rig.watcher().provision()
    rig.operator.job(rig.job())["metadata"]["annotations"] = {HEARTBEAT: "1000000000"}
    assert "deleted" in reaped(rig, "http://127.0.0.1:1")
