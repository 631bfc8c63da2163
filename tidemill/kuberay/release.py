"""Deletes the RayJobs of a run or of a pipeline, and waits until their GPUs are free."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from tidemill.config.names import KFP_RUN_LABEL, RUN_LABEL, selector
from tidemill.kuberay.attempts import Clock, repeat, wait_until_removed
from tidemill.kuberay.cluster import RAY_JOBS, Cluster, Object, labels_of, name_of
from tidemill.kuberay.run_status import ENDED, ENDED_OF, NAMESPACE_FILE, close, own_namespace

RELEASED = "the run was released, for example by its exit handler or `tidemill stop --now`"
Connect = Callable[[str], Cluster]
"""Returns the cluster of a namespace."""


def release_run(cluster: Cluster, run: str, kfp_run: str | None, clock: Clock) -> bool:
    """Delete the RayJobs of a run with everything they own, except those that another pipeline has adopted.

    Args:
        cluster: namespace of the run.
        run: name of the run.
        kfp_run: id of this pipeline run; None deletes the RayJobs of any pipeline run.
        clock: of the wait.

    Returns:
        Whether no RayJob of the run is left.

    Raises:
        RunError: something still exists after `REMOVAL_TIMEOUT_S`.
    """

    def matches(obj: Object) -> bool:
        return kfp_run is None or labels_of(obj).get(KFP_RUN_LABEL, kfp_run) == kfp_run

    repeat(lambda: close(cluster, run, **{ENDED: RELEASED, ENDED_OF: kfp_run or ""}), clock)
    delete(cluster, selector(run), matches, clock)
    return not cluster.list(RAY_JOBS, selector(run))


def release_pipeline(cluster: Cluster, kfp_run: str, clock: Clock) -> None:
    """Delete all RayJobs of a pipeline run; without permission to list RayJobs the pipeline has none here.

    Raises:
        RunError: something still exists after `REMOVAL_TIMEOUT_S`.
    """
    if not cluster.is_allowed("list", RAY_JOBS):
        return
    selected = f"{selector()},{KFP_RUN_LABEL}={kfp_run}"

    def close_all() -> None:
        for run in {labels_of(job)[RUN_LABEL] for job in cluster.list(RAY_JOBS, selected)}:
            close(cluster, run, **{ENDED: RELEASED, ENDED_OF: kfp_run})

    repeat(close_all, clock)
    delete(cluster, selected, lambda obj: True, clock)


def delete(cluster: Cluster, selected: str, matches: Callable[[Object], bool], clock: Clock) -> None:
    """Delete the selected RayJobs and wait until their pods are gone."""

    def delete_all() -> None:
        for job in cluster.list(RAY_JOBS, selected):
            if matches(job):
                cluster.delete(RAY_JOBS, name_of(job))

    repeat(delete_all, clock)
    wait_until_removed(cluster, selected, matches, clock)


def release_this_pipeline(
    kfp_run: str,
    namespaces: Collection[str],
    connect: Connect | None = None,
    namespace_file: Path = NAMESPACE_FILE,
) -> None:
    """Delete all RayJobs of a pipeline run, whatever the settings of its runs are; does nothing outside of a cluster.

    Args:
        kfp_run: id of the pipeline run.
        namespaces: where to look, besides the namespace of this pod.
        connect: by default `KubernetesCluster.connect`.
        namespace_file: names the namespace of this pod.

    Raises:
        RunError: something still exists after `REMOVAL_TIMEOUT_S`.
    """
    own = own_namespace(namespace_file)
    if own is None or not kfp_run:
        return
    if connect is None:
        from tidemill.kuberay.client import KubernetesCluster

        connect = KubernetesCluster.connect
    for namespace in sorted({own, *namespaces}):
        release_pipeline(connect(namespace), kfp_run, time)
