"""What `tidemill status` says of the runs of a namespace, from their RayJobs, pods and notes. Pure but for `look`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tidemill.config.names import HEARTBEAT, RUN_LABEL, attempt_of, selector
from tidemill.kuberay.budget import gpus_of, holding
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
from tidemill.kuberay.run_status import ENDED
from tidemill.kuberay.state import JobState, Phase, assess
from tidemill.observe.markdown import DASHBOARD, STOP
from tidemill.observe.text import counted

SILENT_S = 300.0
"""A watcher that has said nothing for so long is worth a word."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as it stands.

    Attributes:
        run: its name.
        notes: what its watcher noted, see `board.Board`.
        attempt: number of the newest attempt with a RayJob; None where there is none.
        state: of that attempt.
        gpus: that its pods hold now.
        silent_s: seconds since the last sign of life of the watcher; None without a RayJob.
    """

    run: str
    notes: Mapping[str, str]
    attempt: int | None
    state: JobState | None
    gpus: int
    silent_s: float | None

    @property
    def over(self) -> bool:
        """Whether it has ended, as far as is known."""
        noted = self.notes.get("phase") in (Phase.SUCCEEDED, Phase.FAILED) or ENDED in self.notes
        return noted if self.state is None else self.state.phase is Phase.SUCCEEDED or (self.state.over and noted)

    @property
    def unwatched(self) -> bool:
        """Whether it goes on and its watcher has said nothing for long."""
        return self.silent_s is not None and self.silent_s > SILENT_S and not self.over

    def lines(self) -> Iterator[str]:
        """What a person reads: one line, and more below it where there is something to say."""
        yield "  ".join(self.headline())
        if self.state is not None and self.state.fatal is not None:
            yield f"  {self.state.fatal}"
        for pod, wait in ({} if self.state is None else self.state.waiting).items():
            yield f"  pod {pod} waits: {wait}"
        if self.state is None and self.notes.get("error"):
            yield f"  {self.notes['error']}"
        if self.notes.get("failure"):
            yield f"  before: {self.notes['failure']}"
        if self.unwatched and self.silent_s is not None:
            minutes = f"{self.silent_s / 60:.0f} min"
            yield f"  nobody has watched it for {minutes}: `tidemill reap` deletes it after half an hour"
        yield from (f"  {link}" for link in self.links())

    def headline(self) -> Iterator[str]:
        """The parts of the first line."""
        yield self.run
        yield self.progress()
        if self.notes.get("steps"):
            yield f"step {self.notes.get('step', '0')}/{self.notes['steps']}"
        if self.attempt is not None or self.notes.get("attempt"):
            yield f"attempt {self.attempt or self.notes['attempt']}"
        yield f"{counted(self.gpus, 'GPU')} held"
        if self.notes.get("gpu_hours"):
            yield f"{self.notes['gpu_hours']} GPU hours"

    def links(self) -> Iterator[str]:
        """The places to look at, without those that an ended run does not have any more."""
        gone = {STOP, *({DASHBOARD} if self.state is None else ())} if self.over else set()
        lines = self.notes.get("links", "").splitlines()
        return (line for line in lines if line.partition(": ")[0] not in gone)

    def progress(self) -> str:
        """Where it stands, in words."""
        if self.state is not None:
            return self.state.progress
        noted = self.notes.get("phase", "")
        if noted in (Phase.SUCCEEDED, Phase.FAILED):
            return noted
        if self.notes.get(ENDED):
            return f"ended: {self.notes[ENDED]}"
        return "gone: it has no RayJob, and its watcher did not see it end" if noted else "not known"


def look(cluster: Cluster, run: str | None, now: float) -> list[RunStatus]:
    """The runs of a namespace, or one of them, by name.

    Raises:
        ClusterError, RunError: the cluster refuses us, or cannot be reached.
    """
    chosen = selector(run)
    pods = cluster.list(PODS, chosen)
    jobs = cluster.list(RAY_JOBS, chosen)
    boards = {labels_of(board).get(RUN_LABEL, ""): board for board in cluster.list(CONFIG_MAPS, chosen)}
    events = cluster.list(EVENTS) if jobs else []
    names = {*boards, *(labels_of(job).get(RUN_LABEL, "") for job in jobs)} - {""}
    return [status(name, boards.get(name), jobs, pods, events, now) for name in sorted(names)]


def status(
    run: str,
    board: Object | None,
    jobs: Sequence[Object],
    pods: Sequence[Object],
    events: Sequence[Object],
    now: float,
) -> RunStatus:
    """One run, from what there is of all of them."""
    notes = (board or {}).get("data") or {}
    own = [job for job in jobs if labels_of(job).get(RUN_LABEL) == run]
    mine = [pod for pod in pods if labels_of(pod).get(RUN_LABEL) == run]
    gpus = sum(holding(mine, resource) for resource in gpu_resources(mine))
    if not own:
        return RunStatus(run, notes, None, None, gpus, None)
    job = max(own, key=lambda job: attempt_of(labels_of(job)))
    number = attempt_of(labels_of(job))
    state = assess(job, [pod for pod in mine if attempt_of(labels_of(pod)) == number], events, now)
    beat = annotations_of(job).get(HEARTBEAT, "")
    return RunStatus(run, notes, number, state, gpus, now - float(beat) if beat.isdecimal() else None)


def gpu_resources(pods: Sequence[Object]) -> set[str]:
    """Resources of pods that count GPUs: those of a vendor, such as nvidia.com/gpu or amd.com/gpu."""
    names = {
        name
        for pod in pods
        for container in pod["spec"].get("containers", ())
        for name in container.get("resources", {}).get("limits") or {}
    }
    return {name for name in names if "/" in name and any(gpus_of(pod, name) for pod in pods)}
