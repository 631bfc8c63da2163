"""`tidemill status | logs | stop | reap`: runs on Kubernetes, from wherever its API server can be reached."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from tidemill.cli.options import require
from tidemill.config.kubernetes import KubernetesConfig
from tidemill.config.names import STOP, selector
from tidemill.config.reading import load_config
from tidemill.errors import ClusterError, ConfigError, RunError, TidemillError
from tidemill.kuberay.attempts import has_ended
from tidemill.kuberay.cluster import PODS, RAY_JOBS, Cluster, Object, annotations_of, labels_of, name_of, seconds
from tidemill.kuberay.job_state import NODE_TYPE
from tidemill.kuberay.release import release_run
from tidemill.kuberay.run_status import STOPPED, close, own_namespace
from tidemill.kuberay.status import look
from tidemill.retry import wait_for

ALL = "all"
MINUTE_S = 60.0
FOLLOW_S = 2.0
LONGEST = 1_000_000
"""Lines of a log that are shown at most."""
CONSOLE = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
"""Prints lines as they are."""


def connect(namespace: str | None, run: str | None = None) -> Cluster:
    """The cluster of KUBECONFIG, or the one that this process runs in.

    Args:
        namespace: of the runs; None for that of this pod, else the default of the settings.
        run: name of the run that the command works on.

    Raises:
        ConfigError: the run is one of this machine.
        ClusterError: the cluster cannot be reached.
    """
    settings = Path("runs") / (run or "") / "config.yaml"
    if run and settings.is_file() and load_config(settings).cluster.provider != "kuberay":
        fix = (
            f"{settings.parent} is a run of this machine: see its events.jsonl and log.txt. Ctrl-C in the terminal "
            "that started it stops it."
        )
        raise ConfigError("RUN", run, "a run on Kubernetes", fix)
    require("kubernetes")
    from tidemill.kuberay.client import KubernetesCluster

    return KubernetesCluster.connect(namespace or own_namespace() or KubernetesConfig().namespace)


def status(cluster: Cluster, run: str) -> int:
    """Print the state of a run, or of `all`."""
    found = look(cluster, None if run == ALL else run, time.time())
    if not found and run != ALL:
        raise unknown(cluster, run)
    for line in [line for one in found for line in one.lines()] or [f"no runs in namespace {cluster.namespace}"]:
        CONSOLE.print(line)
    return 0


def logs(cluster: Cluster, run: str, *, follow: bool, poll_s: float = FOLLOW_S) -> int:
    """Print what the driver of the newest attempt writes; with `follow` until the run ends, through new attempts.

    Raises:
        ConfigError: there is no such run.
        RunError: its pods are gone.
    """
    shown: set[str] = set()

    def is_complete() -> bool:
        pod = driver_pod(cluster, run)
        if pod is not None and name_of(pod) not in shown:
            shown.add(name_of(pod))
            for line in lines_of(cluster, name_of(pod), follow=follow):
                CONSOLE.print(line)
        jobs = cluster.list(RAY_JOBS, selector(run))
        if pod is None and not jobs:
            raise without_pods(cluster, run)
        if pod is None and not follow:
            CONSOLE.print(f"{run} has no log yet; `tidemill status {run}` says what it waits for")
        return not (follow and jobs)

    wait_for(is_complete, math.inf, poll_s)
    return 0


def without_pods(cluster: Cluster, run: str) -> TidemillError:
    """Why a run has nothing to show: it is over, or does not exist."""
    if not look(cluster, run, time.time()):
        return unknown(cluster, run)
    return RunError(
        f"run {run} has no pods left; its log is in the object store below runs/{run}/attempts/, and at the end of the "
        "log of step `train`"
    )


def lines_of(cluster: Cluster, pod: str, *, follow: bool) -> Iterable[str]:
    """The log of a pod."""
    return cluster.follow(pod) if follow else cluster.log(pod, lines=LONGEST).splitlines()


def driver_pod(cluster: Cluster, run: str) -> Object | None:
    """The pod that follows the driver of the newest attempt, once it has started."""
    pods = [pod for pod in cluster.list(PODS, selector(run)) if NODE_TYPE not in labels_of(pod)]
    started = [pod for pod in pods if pod["status"].get("phase") != "Pending"]
    return max(started, key=lambda pod: seconds(pod["metadata"]["creationTimestamp"]), default=None)


def stop(cluster: Cluster, run: str, *, reason: str, now: bool) -> int:
    """Have a run end after a checkpoint; with `now` delete it.

    Raises:
        ConfigError: there is no such run.
        ClusterError: the request cannot be recorded.
    """
    found = look(cluster, run, time.time())
    if not found:
        raise unknown(cluster, run)
    if found[0].over and (found[0].state is None or not now):
        kept = "" if found[0].state is None else "; `--now` deletes its cluster at once"
        CONSOLE.print(f"{run} is over: {found[0].progress()}{kept}")
    elif now:
        release_run(cluster, run, None, time)
        CONSOLE.print(f"{run} is deleted; its newest checkpoint is kept")
    else:
        request_stop(cluster, run, reason)
        CONSOLE.print(
            f"{run} ends after the current step, with a checkpoint and a model; `tidemill status {run}` shows its "
            "progress, `--now` deletes it at once"
        )
        if found[0].unwatched:
            CONSOLE.print("nobody watches it: it stops when step `train` runs again; `--now` does not wait for that")
    return 0


def request_stop(cluster: Cluster, run: str, reason: str) -> None:
    """Ask for the end of a run: in its status, which also reaches a run between two attempts, and on its attempts.

    Raises:
        ClusterError: the run is between two attempts, and its status cannot be written.
    """
    noted = close(cluster, run, **{STOPPED: reason})
    jobs = [job for job in cluster.list(RAY_JOBS, selector(run)) if not has_ended(job)]
    for job in jobs:
        if STOP not in annotations_of(job):
            cluster.patch(RAY_JOBS, name_of(job), {"metadata": {"annotations": {STOP: reason}}})
    if not (noted or jobs):
        raise ClusterError(
            f"{run} is between two attempts, where stopping it needs the right to patch configmaps. Get that right, or "
            "try again when the next attempt has started."
        )


def reap_runs(cluster: Cluster, older_than_min: int, kfp: str | None, *, dry_run: bool) -> int:
    """Delete the clusters that nobody watches, and old status.

    Args:
        cluster: of the runs.
        older_than_min: minutes since the watcher's last sign of life.
        kfp: address of the KFP that knows which runs are over, or None.
        dry_run: only print what would be deleted.
    """
    from tidemill.kuberay.client import KubernetesCluster
    from tidemill.kuberay.reap import KfpRuns, delete_old_status, reap

    now = time.time()
    if not dry_run:
        delete_old_status(cluster, now)
    is_over = KfpRuns(kfp).is_over if kfp else None
    deleted = False
    for job in reap(cluster, older_than_min * MINUTE_S, now, KubernetesCluster.connect, is_over, dry_run=dry_run):
        deleted = True
        CONSOLE.print(f"{'would delete' if dry_run else 'deleted'} {job.name}: {job.reason}")
    if not deleted:
        CONSOLE.print(f"nothing to delete in namespace {cluster.namespace}")
    return 0


def unknown(cluster: Cluster, run: str) -> ConfigError:
    """The error for a run that does not exist."""
    known = ", ".join(one.run for one in look(cluster, None, time.time())) or "none"
    fix = "Name one of them, or its namespace with --namespace."
    return ConfigError("RUN", run, f"a run of namespace {cluster.namespace}: {known}", fix)
