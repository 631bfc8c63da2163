"""Takes away what nobody looks after any more: the guarantee for when a pipeline ended without its exit handler.

A RayJob is reaped when its watcher has given no sign of life for long, when its KFP run is over, or when the workflow
that owns it is gone. One that has ended by itself holds nothing once its time to live is over, and is left for a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tidemill.config.names import HEARTBEAT, KFP_RUN_LABEL, RUN_LABEL, selector
from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.attempts import ended_at, has_ended
from tidemill.kuberay.cluster import (
    CONFIG_MAPS,
    RAY_JOBS,
    WORKFLOWS,
    Cluster,
    Object,
    annotations_of,
    labels_of,
    name_of,
)
from tidemill.kuberay.state import seconds
from tidemill.observe.text import counted

MINUTE_S = 60.0
DAY_S = 24 * 3600.0
KEPT_S = 14 * DAY_S
"""So long do the notes of a run stay."""
IsOver = Callable[[str], bool]
"""Whether a KFP run, named by its id, is over."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """A RayJob that is taken away: `name`, and `reason` in words."""

    name: str
    reason: str


def reap(
    cluster: Cluster, older_than_s: float, now: float, is_over: IsOver | None = None, *, dry_run: bool = False
) -> Iterator[Reaped]:
    """Delete the RayJobs of a namespace that nobody looks after, and tell of each.

    Args:
        cluster: where.
        older_than_s: age of the last sign of life.
        now: seconds since 1970.
        is_over: asks KFP; None where it cannot be asked.
        dry_run: only find them.

    Raises:
        ClusterError, RunError: the cluster or KFP refuses us, or cannot be reached; where that concerns some of the
            RayJobs, the others are done first.
    """
    unknown: list[ClusterError | RunError] = []
    for job in cluster.list(RAY_JOBS, selector()):
        try:
            reason = forsaken(cluster, job, older_than_s, now, is_over)
            if reason is not None and not dry_run:
                cluster.delete(RAY_JOBS, name_of(job))
        except (ClusterError, RunError) as error:
            unknown.append(error)
        else:
            if reason is not None:
                yield Reaped(name_of(job), reason)
    if unknown:
        raise unknown[0]


def forsaken(cluster: Cluster, job: Object, older_than_s: float, now: float, is_over: IsOver | None) -> str | None:
    """Why nobody looks after a RayJob, None if somebody does, or it is on its way out."""
    if job["metadata"].get("deletionTimestamp"):
        return None
    if has_ended(job):
        return stale(job, now)
    return silent(job, older_than_s, now) or orphaned(cluster, job) or finished(job, is_over)


def sweep(cluster: Cluster, now: float) -> None:
    """Delete the notes of runs that have not changed for long.

    Raises:
        ClusterError, RunError: the cluster refuses us, or cannot be reached.
    """
    for board in cluster.list(CONFIG_MAPS, selector()):
        updated = (board.get("data") or {}).get("updated", "")
        if RUN_LABEL in labels_of(board) and updated.isdecimal() and now - float(updated) > KEPT_S:
            cluster.delete(CONFIG_MAPS, name_of(board))


def stale(job: Object, now: float) -> str | None:
    """Why a job that ended is not kept any more, None if it is. KubeRay deletes its cluster, and never the job."""
    ended = ended_at(job)
    if ended is None or now - ended < DAY_S:
        return None
    return f"it ended {counted(round((now - ended) / DAY_S), 'day')} ago"


def silent(job: Object, older_than_s: float, now: float) -> str | None:
    """Why a job counts as unwatched, None if it does not.

    A sign of life that lies as far in the future is none: the clock that it was made by is wrong, and for how long it
    was not made any more cannot be known.
    """
    beat = annotations_of(job).get(HEARTBEAT, "")
    heard = float(beat) if beat.isdecimal() else 0.0
    last = heard if 0 < heard < now + older_than_s else seconds(job["metadata"]["creationTimestamp"])
    if now - last < older_than_s:
        return None
    return f"its watcher gave no sign of life for {(now - last) / MINUTE_S:.0f} min"


def orphaned(cluster: Cluster, job: Object) -> str | None:
    """Why a job counts as without an owner, None if it has one or never had."""
    for owner in job["metadata"].get("ownerReferences") or ():
        if owner["kind"] != "Workflow":
            continue
        workflow = cluster.get(WORKFLOWS, owner["name"])
        if workflow is None or workflow["metadata"]["uid"] != owner["uid"]:
            return f"its workflow {owner['name']} is gone"
    return None


def finished(job: Object, is_over: IsOver | None) -> str | None:
    """Why a job counts as left by its pipeline, None if it does not."""
    run = labels_of(job).get(KFP_RUN_LABEL)
    if run is None or is_over is None or not is_over(run):
        return None
    return f"its KFP run {run} is over"
