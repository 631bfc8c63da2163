"""The output of `tidemill status`: runs of a namespace, from their RayJobs, pods and status ConfigMaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill.config.names import HEARTBEAT, RUN_LABEL, attempt_of, selector
from tidemill.kuberay.budget import gpus_of, held_gpus
from tidemill.kuberay.cluster import (
    CONFIG_MAPS,
    EVENTS,
    PODS,
    RAY_JOBS,
    Cluster,
    Object,
    annotations_of,
    labels_of,
)
from tidemill.kuberay.job_state import JobState, Phase, assess
from tidemill.kuberay.run_status import ENDED
from tidemill.observe.markdown import DASHBOARD, STOP
from tidemill.observe.text import counted

HEARTBEAT_LIMIT_S = 300.0
"""Age of a heartbeat from which on `tidemill status` warns."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run in the output of `tidemill status`."""

    run: str
    recorded: Mapping[str, str]  # fields of its ConfigMap
    attempt: int | None  # the newest with a RayJob
    state: JobState | None
    gpus: int  # that its pods hold now
    heartbeat_age_s: float | None

    @property
    def over(self) -> bool:
        recorded = self.recorded.get("phase") in (Phase.SUCCEEDED, Phase.FAILED) or ENDED in self.recorded
        return recorded if self.state is None else self.state.phase is Phase.SUCCEEDED or (self.state.over and recorded)

    @property
    def unwatched(self) -> bool:
        """Whether the run continues without a recent heartbeat of its watcher."""
        return self.heartbeat_age_s is not None and self.heartbeat_age_s > HEARTBEAT_LIMIT_S and not self.over

    def lines(self) -> Iterator[str]:
        yield "  ".join(self.headline())
        if self.state is not None and self.state.fatal is not None:
            yield f"  {self.state.fatal}"
        for pod, wait in ({} if self.state is None else self.state.waiting).items():
            yield f"  pod {pod} waits: {wait}"
        if self.state is None and self.recorded.get("error"):
            yield f"  {self.recorded['error']}"
        if self.recorded.get("failure"):
            yield f"  before: {self.recorded['failure']}"
        if self.unwatched and self.heartbeat_age_s is not None:
            minutes = f"{self.heartbeat_age_s / 60:.0f} min"
            yield f"  its watcher has been silent for {minutes}: `tidemill reap` deletes the run after half an hour"
        yield from (f"  {link}" for link in self.links())

    def headline(self) -> Iterator[str]:
        yield self.run
        yield self.progress()
        if self.recorded.get("steps"):
            yield f"step {self.recorded.get('step', '0')}/{self.recorded['steps']}"
        if self.attempt is not None or self.recorded.get("attempt"):
            yield f"attempt {self.attempt or self.recorded['attempt']}"
        yield f"{counted(self.gpus, 'GPU')} held"
        if self.recorded.get("gpu_hours"):
            yield f"{self.recorded['gpu_hours']} GPU hours"

    def links(self) -> Iterator[str]:
        """The links of the run, without those that do not work after its end."""
        gone = {STOP, *({DASHBOARD} if self.state is None else ())} if self.over else set()
        lines = self.recorded.get("links", "").splitlines()
        return (line for line in lines if line.partition(": ")[0] not in gone)

    def progress(self) -> str:
        if self.state is not None:
            return self.state.progress
        phase = self.recorded.get("phase", "")
        if phase in (Phase.SUCCEEDED, Phase.FAILED):
            return phase
        if self.recorded.get(ENDED):
            return f"ended: {self.recorded[ENDED]}"
        return "gone: it has no RayJob, and its watcher did not see its end" if phase else "unknown"


def look(cluster: Cluster, run: str | None, now: float) -> list[RunOverview]:
    """The runs of a namespace in order of their names, or one of them."""
    selected = selector(run)
    pods = cluster.list(PODS, selected)
    jobs = cluster.list(RAY_JOBS, selected)
    statuses = {labels_of(found).get(RUN_LABEL, ""): found for found in cluster.list(CONFIG_MAPS, selected)}
    events = cluster.list(EVENTS) if jobs else []
    names = {*statuses, *(labels_of(job).get(RUN_LABEL, "") for job in jobs)} - {""}
    return [overview(name, statuses.get(name), jobs, pods, events, now) for name in sorted(names)]


def overview(
    run: str,
    status: Object | None,
    jobs: Sequence[Object],
    pods: Sequence[Object],
    events: Sequence[Object],
    now: float,
) -> RunOverview:
    recorded = (status or {}).get("data") or {}
    own_jobs = [job for job in jobs if labels_of(job).get(RUN_LABEL) == run]
    own_pods = [pod for pod in pods if labels_of(pod).get(RUN_LABEL) == run]
    gpus = sum(held_gpus(own_pods, resource) for resource in gpu_resources(own_pods))
    if not own_jobs:
        return RunOverview(run, recorded, None, None, gpus, None)
    job = max(own_jobs, key=lambda job: attempt_of(labels_of(job)))
    number = attempt_of(labels_of(job))
    state = assess(job, [pod for pod in own_pods if attempt_of(labels_of(pod)) == number], events, now)
    heartbeat = annotations_of(job).get(HEARTBEAT, "")
    return RunOverview(run, recorded, number, state, gpus, now - float(heartbeat) if heartbeat.isdecimal() else None)


def gpu_resources(pods: Sequence[Object]) -> set[str]:
    """Resources of the pods that are GPUs: those with a vendor, such as nvidia.com/gpu or amd.com/gpu."""
    names = {
        name
        for pod in pods
        for container in pod["spec"].get("containers", ())
        for name in container.get("resources", {}).get("limits") or {}
    }
    return {name for name in names if "/" in name and any(gpus_of(pod, name) for pod in pods)}
