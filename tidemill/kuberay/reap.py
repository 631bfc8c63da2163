"""Deletes abandoned RayJobs: GPUs come back even if a pipeline ended without its exit handler.

A RayJob is abandoned if its watcher has written no heartbeat for long, if its KFP run is over, or if the workflow that
owns it is gone. One that has ended keeps its cluster for its time to live, so that the dashboard can be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import urllib3
from urllib3.exceptions import HTTPError

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
    seconds,
)

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
    cluster: Cluster, max_age_s: float, now: float, is_over: IsOver | None = None, *, dry_run: bool = False
) -> Iterator[Reaped]:
    """Delete the abandoned RayJobs of a namespace, and yield each.

    Args:
        cluster: the namespace.
        max_age_s: age of a heartbeat at which a RayJob is abandoned.
        now: seconds since 1970.
        is_over: asks KFP; None if KFP cannot be asked.
        dry_run: only find them.

    Raises:
        ClusterError, RunError: the cluster or KFP refuses a request or cannot be reached. If this concerns some of the
            RayJobs only, the error is raised after the others.
    """
    errors: list[ClusterError | RunError] = []
    for job in cluster.list(RAY_JOBS, selector()):
        try:
            reason = abandoned(cluster, job, max_age_s, now, is_over)
            if reason is not None and not dry_run:
                cluster.delete(RAY_JOBS, name_of(job))
        except (ClusterError, RunError) as error:
            errors.append(error)
        else:
            if reason is not None:
                yield Reaped(name_of(job), reason)
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


def abandoned(cluster: Cluster, job: Object, max_age_s: float, now: float, is_over: IsOver | None) -> str | None:
    """Why a RayJob is abandoned; None if it is not, or is being deleted."""
    if job["metadata"].get("deletionTimestamp"):
        return None
    if has_ended(job) and now - (ended_at(job) or created_at(job)) < job["spec"].get("ttlSecondsAfterFinished", 0):
        return None
    return unwatched(job, max_age_s, now) or orphaned(cluster, job) or left_by_pipeline(job, is_over)


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


def orphaned(cluster: Cluster, job: Object) -> str | None:
    """Why a RayJob has lost its owner; None if the owner exists, or there never was one."""
    for owner in job["metadata"].get("ownerReferences") or ():
        if owner["kind"] != "Workflow":
            continue
        workflow = cluster.get(WORKFLOWS, owner["name"])
        if workflow is None or workflow["metadata"]["uid"] != owner["uid"]:
            return f"its workflow {owner['name']} is gone"
    return None


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
