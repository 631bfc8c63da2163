"""Two watchers of one run: the slower one follows the other."""

from __future__ import annotations

import pytest
from kuberay_rig import Rig, holds_on

from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.cluster import RAY_JOBS
from tidemill.kuberay.run_status import FAILED
from tidemill.store.attempt import Attempt


@pytest.mark.parametrize("ahead", ["runs", "gone", "succeeded", "given up"])
def test_a_watcher_that_is_slower_than_another_one_follows_it(rig: Rig, ahead: str) -> None:
    """Both saw attempt 1 fail. While this one waits for its pods to end, the other one starts attempts 2 and 3."""
    first = rig.watcher().provision()
    rig.starts()
    holds_on(rig, 20, 200)
    rig.clock.after(50, lambda: rig.fails(1, RunError("lost")))

    def go_ahead() -> None:
        rig.steps(2, 1)
        if ahead == "runs":
            rig.attempts.create(2)
            rig.operator.admit(rig.job(2))
        elif ahead == "succeeded":
            rig.leaves(2)
        elif ahead == "given up":
            rig.attempts.record_verdict(Attempt(rig.config.name, 2), ClusterError("no room"))

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
    assert rig.created() == [rig.job(1), *([rig.job(last)] if last else [])]


def test_a_rayjob_that_another_watcher_removed_was_not_deleted_from_outside(rig: Rig) -> None:
    """The other watcher sees first that the head is lost, and removes the attempt to start the next one."""
    first = rig.watcher().provision()
    rig.starts()

    def take_away() -> None:
        rig.status.update(**{FAILED: 1})
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(50, take_away)
    rig.starts(2, after=80)
    rig.clock.after(120, lambda: rig.succeeds(2))
    assert rig.watcher().follow(first).steps == 3
    assert rig.created() == [rig.job(1), rig.job(2)]


def test_the_verdict_of_another_watcher_is_raised(rig: Rig) -> None:
    first = rig.watcher().provision()
    rig.starts()

    def give_up() -> None:
        rig.attempts.record_verdict(Attempt(rig.config.name, 1), ClusterError("no node can hold it"))
        rig.cluster.delete(RAY_JOBS, rig.job())

    rig.clock.after(50, give_up)
    with pytest.raises(ClusterError, match="no node can hold it"):
        rig.watcher().follow(first)
