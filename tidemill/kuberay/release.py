"""Gives back what runs hold in a cluster, and waits until it is given back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from tidemill.config.names import KFP_RUN_LABEL, RUN_LABEL, selector
from tidemill.kuberay.attempts import Clock, WallClock, patiently, wait_until_none
from tidemill.kuberay.cluster import RAY_JOBS, Cluster, Object, labels_of, name_of
from tidemill.kuberay.run_status import close

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""What a pod of a cluster finds its namespace in."""
GIVEN_BACK = "the run was given back, as by its exit handler or `tidemill stop --now`"


def release_run(cluster: Cluster, run: str, kfp_run: str | None, clock: Clock) -> bool:
    """Delete the RayJobs of a run, but for those that another pipeline has taken over, with all that is theirs.

    Args:
        cluster: where they are.
        run: its name.
        kfp_run: id of our pipeline run; None deletes whosever they are.
        clock: for the wait.

    Returns:
        Whether nothing of the run is left.

    Raises:
        RunError: something is still there after some minutes.
    """

    def ours(thing: Object) -> bool:
        return kfp_run is None or labels_of(thing).get(KFP_RUN_LABEL, kfp_run) == kfp_run

    patiently(lambda: close(cluster, run, ended=GIVEN_BACK, ended_of=kfp_run or ""), clock)
    release(cluster, selector(run), ours, clock)
    return not cluster.list(RAY_JOBS, selector(run))


def release_pipeline(cluster: Cluster, kfp_run: str, clock: Clock) -> None:
    """Delete the RayJobs of a pipeline run, whatever they are called; where we may not look, nothing is ours.

    Raises:
        RunError: something is still there after some minutes.
    """
    if not cluster.may("list", RAY_JOBS):
        return
    chosen = f"{selector()},{KFP_RUN_LABEL}={kfp_run}"

    def close_all() -> None:
        for run in {labels_of(job)[RUN_LABEL] for job in cluster.list(RAY_JOBS, chosen)}:
            close(cluster, run, ended=GIVEN_BACK, ended_of=kfp_run)

    patiently(close_all, clock)
    release(cluster, chosen, lambda thing: True, clock)


def release(cluster: Cluster, chosen: str, ours: Callable[[Object], bool], clock: Clock) -> None:
    """Delete RayJobs and wait for what they own."""

    def delete() -> None:
        for job in cluster.list(RAY_JOBS, chosen):
            if ours(job):
                cluster.delete(RAY_JOBS, name_of(job))

    patiently(delete, clock)
    wait_until_none(cluster, chosen, ours, clock)


def release_this_pipeline(kfp_run: str, namespaces: Collection[str]) -> None:
    """Give back what a pipeline run holds, whatever its settings say by now; nothing outside of a cluster.

    Args:
        kfp_run: its id.
        namespaces: where to look besides the namespace of this pod.

    Raises:
        RunError: something is still there after some minutes.
    """
    own = own_namespace()
    if own is None or not kfp_run:
        return
    from tidemill.kuberay.client import KubernetesCluster

    for namespace in sorted({own, *namespaces}):
        release_pipeline(KubernetesCluster.connect(namespace), kfp_run, WallClock())


def own_namespace() -> str | None:
    """The namespace of this pod, None outside of a cluster."""
    return NAMESPACE.read_text(encoding="utf-8").strip() if NAMESPACE.is_file() else None
