"""`tidemill status | logs | stop | reap`: runs on Kubernetes, from wherever its API server can be reached."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

from rich.console import Console

from tidemill.config.names import STOP, selector
from tidemill.errors import ClusterError, ConfigError, RunError, TidemillError
from tidemill.kuberay.attempts import WallClock, has_ended
from tidemill.kuberay.cluster import PODS, RAY_JOBS, Cluster, Object, annotations_of, labels_of, name_of, seconds
from tidemill.kuberay.job_state import NODE_TYPE
from tidemill.kuberay.reap import KfpRuns, delete_old_status, reap
from tidemill.kuberay.release import release_run
from tidemill.kuberay.run_status import STOPPED, close
from tidemill.kuberay.status import look

ALL = "all"
MINUTE_S = 60.0
FOLLOW_S = 2.0
LONGEST = 1_000_000
"""Lines of a log that are shown at most."""


def status(arguments: argparse.Namespace, cluster: Cluster, console: Console) -> int:
    """Where runs stand, and why they do not go on."""
    run = None if arguments.run == ALL else arguments.run
    found = look(cluster, run, time.time())
    if not found and run is not None:
        raise unknown(cluster, run)
    if not found:
        say(console, f"no runs in namespace {cluster.namespace}")
    for one in found:
        for line in one.lines():
            say(console, line)
    return 0


def logs(arguments: argparse.Namespace, cluster: Cluster, console: Console) -> int:
    """What the driver of the newest attempt wrote; on and on with `--follow`, also through new attempts."""
    seen: set[str] = set()
    while True:
        pod = driver_pod(cluster, arguments.run)
        if pod is not None and name_of(pod) not in seen:
            seen.add(name_of(pod))
            for line in lines_of(cluster, name_of(pod), follow=arguments.follow):
                say(console, line)
        jobs = cluster.list(RAY_JOBS, selector(arguments.run))
        if pod is None and not jobs:
            raise without_pods(cluster, arguments.run)
        if pod is None and not arguments.follow:
            say(
                console,
                f"{arguments.run} has written nothing yet; `tidemill status {arguments.run}` says what it waits for",
            )
        if not arguments.follow or not jobs:
            return 0
        time.sleep(FOLLOW_S)


def without_pods(cluster: Cluster, run: str) -> TidemillError:
    """Why there is nothing to show of a run: it is over, or there is none of this name."""
    if not look(cluster, run, time.time()):
        return unknown(cluster, run)
    return RunError(
        f"run {run} has no pod any more; its log stands in the object store below runs/{run}/attempts/, and at the end "
        "of step `train`"
    )


def lines_of(cluster: Cluster, pod: str, *, follow: bool) -> Iterable[str]:
    """The log of a pod."""
    return cluster.follow(pod) if follow else cluster.log(pod, lines=LONGEST).splitlines()


def driver_pod(cluster: Cluster, run: str) -> Object | None:
    """The pod that follows the driver of the newest attempt, once it has begun to write."""
    pods = [pod for pod in cluster.list(PODS, selector(run)) if NODE_TYPE not in labels_of(pod)]
    started = [pod for pod in pods if pod["status"].get("phase") != "Pending"]
    newest = sorted(started, key=lambda pod: seconds(pod["metadata"]["creationTimestamp"]))
    return newest[-1] if newest else None


def stop(arguments: argparse.Namespace, cluster: Cluster, console: Console) -> int:
    """Have a run end after a checkpoint; with `--now` delete it."""
    run = arguments.run
    found = look(cluster, run, time.time())
    if not found:
        raise unknown(cluster, run)
    if found[0].over and (found[0].state is None or not arguments.now):
        kept = "" if found[0].state is None else "; `--now` deletes its cluster at once"
        say(console, f"{run} is over: {found[0].progress()}{kept}")
        return 0
    if arguments.now:
        release_run(cluster, run, None, WallClock())
        say(console, f"{run} is deleted; its newest checkpoint is kept")
        return 0
    ask_to_stop(cluster, run, arguments.reason)
    say(
        console,
        f"{run} ends after the step under way, with a checkpoint and a model; `tidemill status {run}` shows how far it "
        "is, `--now` deletes it at once",
    )
    if found[0].unwatched:
        say(console, "but nobody watches it now: it hears of that when step `train` runs again; `--now` does not wait")
    return 0


def ask_to_stop(cluster: Cluster, run: str, reason: str) -> None:
    """Tell whoever watches a run that it is to end, also one who is between two attempts.

    Raises:
        ClusterError: he is, and we may not write where he looks then.
    """
    noted = close(cluster, run, **{STOPPED: reason})
    jobs = [job for job in cluster.list(RAY_JOBS, selector(run)) if not has_ended(job)]
    for job in jobs:
        if STOP not in annotations_of(job):
            cluster.patch(RAY_JOBS, name_of(job), {"metadata": {"annotations": {STOP: reason}}})
    if not (noted or jobs):
        fix = "Ask for that right, or again once the next attempt has begun"
        raise ClusterError(f"{run} is between two attempts, and only who may patch configmaps stops it there. {fix}.")


def reap_runs(arguments: argparse.Namespace, cluster: Cluster, console: Console) -> int:
    """Delete what nobody looks after, and old notes."""
    now, age, dry = time.time(), arguments.older_than * MINUTE_S, arguments.dry_run
    if not dry:
        delete_old_status(cluster, now)
    is_over = KfpRuns(arguments.endpoint).is_over if arguments.endpoint else None
    found = False
    for job in reap(cluster, age, now, is_over, dry_run=dry):
        found = True
        say(console, f"{'would delete' if dry else 'deleted'} {job.name}: {job.reason}")
    if not found:
        say(console, f"nothing to delete in namespace {cluster.namespace}")
    return 0


def say(console: Console, line: str) -> None:
    """One line as it is."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def unknown(cluster: Cluster, run: str) -> ConfigError:
    """There is no such run."""
    known = ", ".join(one.run for one in look(cluster, None, time.time())) or "there is none"
    fix = "Name one of them, or its namespace with --namespace."
    return ConfigError("RUN", run, f"a run of namespace {cluster.namespace}: {known}", fix)
