"""Deletes abandoned RayJobs: GPUs come back even if a pipeline ended without its exit handler.

A RayJob is abandoned if its watcher has written no heartbeat for long, if its KFP run is over, or if the workflow of
its pipeline is gone. KFP deletes the running workflows of a schedule together with the schedule, without their exit
handlers, and shows their runs as RUNNING for ever; so its word alone does not suffice. A RayJob that has ended keeps
its cluster for its time to live, so that the dashboard can be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import urllib3
from urllib3.exceptions import HTTPError

from tidemill.config.names import HEARTBEAT, KFP_RUN_LABEL, RUN_LABEL, WORKFLOW_ANNOTATION, selector
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
    seconds,
)
from tidemill.kuberay.release import Connect

MINUTE_S = 60.0
STATUS_KEPT_S = 14 * 24 * 3600.0
"""Age at which the status of a run is deleted."""
KFP_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
TOKEN_PATH = "KF_PIPELINES_SA_TOKEN_PATH"
"""Environment variable that names the pod's token for KFP; KFP's own client reads it too."""
RETRIES = urllib3.Retry(3, backoff_factor=0.5, status_forcelist={429, 500, 502, 503, 504}, raise_on_status=False)
IsOver = Callable[[str], bool]
"""Whether the KFP run with an id is over."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Name of a RayJob that is deleted, and why."""

    name: str
    reason: str


def reap(
    cluster: Cluster,
    max_age_s: float,
    now: float,
    connect: Connect,
    is_over: IsOver | None = None,
    *,
    dry_run: bool = False,
) -> Iterator[Reaped]:
    """Delete the abandoned RayJobs of a namespace, and yield each.

    Args:
        cluster: the namespace.
        max_age_s: age of a heartbeat at which a RayJob is abandoned.
        now: seconds since 1970.
        connect: returns the cluster of another namespace, for the workflows there.
        is_over: asks KFP; None if KFP cannot be asked.
        dry_run: only find them.

    Raises:
        ClusterError, RunError: the cluster or KFP refuses a request or cannot be reached. An error about one RayJob, or
            one question about it, is raised after all others.
    """
    errors: list[ClusterError | RunError] = []
    checks: tuple[Callable[[Object], str | None], ...] = (
        lambda job: unwatched(job, max_age_s, now),
        lambda job: orphaned(job, connect),
        lambda job: left_by_pipeline(job, is_over),
    )
    for job in cluster.list(RAY_JOBS, selector()):
        for check in () if is_kept(job, now) else checks:
            try:
                reason = check(job)
                if reason is not None and not dry_run:
                    cluster.delete(RAY_JOBS, name_of(job))
            except (ClusterError, RunError) as error:
                errors.append(error)
            else:
                if reason is not None:
                    yield Reaped(name_of(job), reason)
                    break
    if errors:
        raise errors[0]


def delete_old_status(cluster: Cluster, now: float) -> None:
    """Delete the status of runs that have not changed for `STATUS_KEPT_S`.

    Raises:
        ClusterError, RunError: the cluster refuses a request, or cannot be reached.
    """
    for status in cluster.list(CONFIG_MAPS, selector()):
        updated = (status.get("data") or {}).get("updated", "")
        if RUN_LABEL in labels_of(status) and updated.isdecimal() and now - float(updated) > STATUS_KEPT_S:
            cluster.delete(CONFIG_MAPS, name_of(status))


def is_kept(job: Object, now: float) -> bool:
    """Whether a RayJob is being deleted already, or has ended within its time to live."""
    if job["metadata"].get("deletionTimestamp"):
        return True
    return has_ended(job) and now - (ended_at(job) or created_at(job)) < job["spec"].get("ttlSecondsAfterFinished", 0)


def unwatched(job: Object, max_age_s: float, now: float) -> str | None:
    """Why a RayJob has no watcher, None if it has one.

    A heartbeat more than `max_age_s` in the future comes from a wrong clock and has no known age, so the age of the
    RayJob counts instead.
    """
    text = annotations_of(job).get(HEARTBEAT, "")
    heartbeat = float(text) if text.isdecimal() else 0.0
    last = heartbeat if 0 < heartbeat < now + max_age_s else created_at(job)
    if now - last < max_age_s:
        return None
    return f"its watcher has written no heartbeat for {(now - last) / MINUTE_S:.0f} min"


def created_at(job: Object) -> float:
    return seconds(job["metadata"]["creationTimestamp"])


def orphaned(job: Object, connect: Connect) -> str | None:
    """Why no step and no exit handler of the pipeline of a RayJob runs; None if its workflow exists, or has no name.

    The name of a workflow is never used twice, except by KFP's Retry of a run whose workflow was deleted.
    """
    namespace, _, name = annotations_of(job).get(WORKFLOW_ANNOTATION, "").partition("/")
    if not name:
        return None
    workflow = connect(namespace).get(WORKFLOWS, name)
    if workflow is not None and not workflow["metadata"].get("deletionTimestamp"):
        return None
    return f"its workflow {name} in namespace {namespace} is gone"


def left_by_pipeline(job: Object, is_over: IsOver | None) -> str | None:
    """Why the pipeline of a RayJob is over, None if it is not."""
    run = labels_of(job).get(KFP_RUN_LABEL)
    if run is None or is_over is None or not is_over(run):
        return None
    return f"its KFP run {run} is over"


class KfpRuns:
    """The runs of the KFP API at an endpoint such as `http://ml-pipeline.kubeflow:8888`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=5, read=30), retries=RETRIES)

    def is_over(self, run: str) -> bool:
        """Whether a run has ended or was deleted.

        Raises:
            RunError: KFP cannot be reached.
            ClusterError: KFP refuses the request.
        """
        path = os.environ.get(TOKEN_PATH)
        headers = {"Authorization": f"Bearer {Path(path).read_text(encoding='utf-8').strip()}"} if path else {}
        url = f"{self.endpoint}/apis/v2beta1/runs/{run}"
        try:
            response = self.pool.request("GET", url, headers=headers)
        except HTTPError as error:
            raise RunError(f"KFP at {self.endpoint} cannot be reached: {error}") from error
        if response.status == 404:
            return True
        if response.status != 200:
            raise ClusterError(f"KFP at {self.endpoint} refuses to return run {run}: status {response.status}")
        return json.loads(response.data).get("state") in KFP_ENDED
