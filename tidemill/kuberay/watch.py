"""The watcher of a run on Kubernetes, from its first attempt to its end. The training does not depend on it: the
watcher can be killed and restarted at any time, and continues from what it finds.

    RayJob, pods ─► state ─► decision ─► wait, end the attempt, or start the next one
    store        ─► events ─► log of the step        annotation, budget ─► stop.json in the store
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tenacity import RetryCallState

from tidemill.config.names import HEARTBEAT, STOP, attempt_of, job_name, selector
from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, RunError, StoreError, StoreGapError, TidemillError
from tidemill.kuberay.attempts import Attempts, ended_at, repeat
from tidemill.kuberay.budget import GpuUsage
from tidemill.kuberay.cluster import EVENTS, PODS, RAY_JOBS, Cluster, Object, annotations_of, labels_of, seconds
from tidemill.kuberay.job_state import JobState, Phase, assess
from tidemill.kuberay.run_status import FAILED, RunStatus
from tidemill.observe.console import Progress
from tidemill.observe.events import Event, EventLog, Notice, PhaseStarted, StepFinished, parse_line
from tidemill.observe.markdown import cluster_rows
from tidemill.observe.report import Summary
from tidemill.retry import OUTAGE_S, retrying
from tidemill.store.attempt import Attempt
from tidemill.store.journal import JournalReader
from tidemill.store.object_store import ObjectStore

POLL_S = 5.0
HEARTBEAT_S = 30.0
STOP_GRACE_S = 900.0
"""Time for the current step, the checkpoint and the export after a run was told to stop for its budget."""
OFFSET_FILE = "mirrored.json"


@dataclass(frozen=True, slots=True)
class EventOutput:
    """Where events go: the event log in the step's folder, and the progress display."""

    log: EventLog
    progress: Progress

    def write(self, event: Event) -> None:
        self.log.write(event)
        self.progress.handle(event)


@dataclass(slots=True)
class EventTail:
    """Copies the events of one attempt from the store to the step; a restarted step continues from its offset file."""

    reader: JournalReader
    output: EventOutput
    offset_file: Path  # how many bytes were copied
    attempt: int
    rest: bytes = b""  # an incomplete line
    lines: int = 0
    last: StepFinished | None = None

    @classmethod
    def of(cls, store: ObjectStore, attempt: Attempt, output: EventOutput) -> EventTail:
        path = output.log.path.with_name(OFFSET_FILE)
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        offset = earlier["offset"] if earlier.get("attempt") == attempt.number else 0
        return cls(JournalReader(store, attempt.events, offset), output, path, attempt.number)

    def read(self) -> bytes:
        """The bytes that are new. A gap is reported and skipped, because the events after it are there."""
        try:
            return self.reader.read()
        except StoreGapError as gap:
            self.output.write(Notice(f"{gap}; the log continues after the gap"))
            self.reader.offset, self.rest = gap.end, b""
            return b""

    def copy_new(self) -> None:
        *lines, self.rest = (self.rest + self.read()).split(b"\n")
        for line in lines:
            self.lines += 1
            if line:
                event = parse_line(Path(self.reader.prefix), self.lines, line)
                self.last = event if isinstance(event, StepFinished) else self.last
                self.output.write(event)
        if lines:
            complete = self.reader.offset - len(self.rest)
            self.offset_file.write_text(json.dumps({"attempt": self.attempt, "offset": complete}), encoding="utf-8")


@dataclass(slots=True)
class WatchedAttempt:
    """What the watcher remembers of the current attempt."""

    attempt: Attempt
    events: EventTail
    reported: set[str] = field(default_factory=set)  # messages that were already written
    heartbeat: float = 0.0
    stop_reason: str | None = None
    stop_by: float | None = None  # when it must have ended


@dataclass(slots=True)
class Watcher:
    """Follows the attempts at a run until the last one has ended."""

    attempts: Attempts
    output: EventOutput
    usage: GpuUsage
    config: RunConfig = field(init=False)
    cluster: Cluster = field(init=False)
    store: ObjectStore = field(init=False)
    status: RunStatus = field(init=False)

    def __post_init__(self) -> None:
        self.config, self.cluster = self.attempts.config, self.attempts.cluster
        self.store, self.status = self.attempts.store, self.attempts.status

    def provision(self) -> int:
        """The number of the active attempt; a new one is created if none is active, whatever ended the run before.

        Raises:
            ClusterError: the budget is used up, or the run was ended at this moment.
        """
        try:
            self.status.reopen()
            number = self.attempts.active()
            if number is None:
                self.check_budget()
                number = self.attempts.replace()
            self.attempts.remove_if_ended(number)
        except TidemillError as error:
            self.record_end(error)
            raise
        links = "\n".join(f"{name}: {address}" for name, address in cluster_rows(self.config))
        self.record(attempt=number, phase=Phase.STARTING, links=links, error=None)
        return number

    def follow(self, first: int) -> Summary:
        """Watch until the run has ended. A new attempt follows one that failed for a transient reason.

        Args:
            first: the attempt with which this pipeline run started; results of earlier ones do not count.

        Raises:
            RunError: the last attempt failed; another one might succeed.
            TidemillError: an attempt failed, and another one would fail too; or it was deleted, or is out of budget.
        """
        try:
            if self.status.released():  # a user retries steps of a pipeline in KFP after its exit handler has run
                first = self.provision()
            summary = self.follow_attempts(first, self.attempt_to_watch(first))
        except TidemillError as error:
            self.record_end(error)
            raise
        self.record(phase=Phase.SUCCEEDED, progress=None, step=summary.steps, error=None)
        self.release()
        return replace(summary, total_seconds=max(summary.total_seconds, self.usage.seconds))

    def release(self) -> None:
        """Delete the RayJobs of a run that has its results: no later step needs them, and after KFP's Retry no exit
        handler runs. A refusal is only reported: KubeRay deletes the cluster after its time to live.
        """
        try:
            repeat(self.attempts.delete, self.attempts.clock)
        except (ClusterError, RunError) as error:
            keep_s = self.config.kubernetes.keep_s
            self.output.write(Notice(f"the cluster stays for {keep_s} s after its end, because: {error}"))

    def follow_attempts(self, first: int, number: int) -> Summary:
        last = first + self.config.kubernetes.max_restarts
        while True:
            watched = self.watch(number)
            state = self.wait_for_end(watched)
            summary = self.attempts.result(watched.attempt)
            if summary is not None:
                return summary
            error = self.error(watched, state)
            final = not isinstance(error, RunError) or number >= last or watched.stop_reason is not None
            if final:  # recorded first: a watcher that is killed while the pods end must not start another attempt
                self.attempts.record_verdict(watched.attempt, error)
            else:
                self.record(failure=f"attempt {number}: {error}", **{FAILED: number})
            self.remove(number, error)
            if final:
                raise error
            cause, *_ = str(error).splitlines()
            self.output.write(Notice(f"attempt {number} failed, {last - number} more: {cause}"))
            number = self.attempt_to_watch(number)  # another watcher may have started the next one

    def attempt_to_watch(self, first: int) -> int:
        """The attempt to watch, from `first` on: one with a RayJob, one that has succeeded meanwhile, or a new one."""
        number = self.attempts.newest()
        if number is not None:
            self.attempts.remove_if_ended(number)
            return number
        last = max(first, self.attempts.newest_stored())
        newest = Attempt(self.config.name, last)
        verdict = self.attempts.verdict(newest)
        if verdict is not None:
            raise verdict
        if self.attempts.failure(newest) is None and self.attempts.result(newest) is not None:
            return last
        self.check_budget()
        self.attempts.continue_with(last + 1)
        return last + 1

    def check_budget(self) -> None:
        """Refuse to start an attempt that would have to be stopped at once."""
        limit = self.config.kubernetes.gpu_hours
        if limit is not None and self.usage.hours >= limit:
            raise ClusterError(
                f"the budget of {limit:g} GPU hours (kubernetes.gpu_hours) is used up: {self.usage.hours:.2f}. Raise "
                "it to continue from the newest checkpoint."
            )

    def watch(self, number: int) -> WatchedAttempt:
        attempt = Attempt(self.config.name, number)
        self.output.write(PhaseStarted(f"attempt {number}: RayJob {job_name(self.config.name, number)}"))
        return WatchedAttempt(attempt, EventTail.of(self.store, attempt, self.output))

    def error(self, watched: WatchedAttempt, state: JobState) -> TidemillError:
        """The error of an attempt that is over; a RayJob that another watcher removed was not deleted from outside."""
        number = watched.attempt.number
        if state.phase is Phase.GONE and self.status.fields().get(FAILED) == str(number):
            return RunError(f"another watcher removed RayJob {job_name(self.config.name, number)}, which had failed")
        return self.attempts.error(watched.attempt, state)

    def remove(self, number: int, error: TidemillError) -> None:
        try:
            self.attempts.remove(number)
        except RunError as left:
            raise RunError(f"{error}\nIts cluster is not removed either: {left}") from error.__cause__

    def wait_for_end(self, watched: WatchedAttempt) -> JobState:
        """Poll an attempt until it is over."""
        clock = self.attempts.clock

        def report_outage(call: RetryCallState) -> None:
            cause = call.outcome.exception() if call.outcome else None
            self.report_once(watched, f"{cause}; the run continues, and the watcher tries again")

        while True:
            polling = retrying(
                (RunError, StoreError),
                OUTAGE_S,
                POLL_S,
                now=clock.time,
                sleep=clock.sleep,
                before_sleep=report_outage,
            )
            state: JobState = polling(self.poll, watched)
            if state.over:
                return state
            clock.sleep(POLL_S)

    def poll(self, watched: WatchedAttempt) -> JobState:
        """Read the state once and act on it. The heartbeat comes first, because the store may be away for long."""
        now = self.attempts.clock.time()
        pods = self.cluster.list(PODS, selector(self.config.name))
        job = self.cluster.get(RAY_JOBS, job_name(self.config.name, watched.attempt.number))
        own = [pod for pod in pods if attempt_of(labels_of(pod)) == watched.attempt.number]
        state = assess(job, own, self.events(own), now)
        self.usage.update(pods, self.config.kubernetes.gpu_resource, now, ended_at(job))
        due = now - watched.heartbeat >= HEARTBEAT_S
        if due and not state.over:
            self.write_heartbeat(watched, state, now)
        watched.events.copy_new()
        self.report(watched, state)
        if due or state.over:
            self.usage.save(self.store, self.config.name)
        if job is not None and not state.over:
            self.forward_stop(watched, job, now)
        return self.with_deadlines(watched, state, job, now)

    def events(self, pods: Sequence[Object]) -> Sequence[Object]:
        """Events of the namespace, which can be very many: read only while a pod is pending."""
        if pods and all(pod["status"].get("phase") != "Pending" for pod in pods):
            return ()
        return self.cluster.list(EVENTS)

    def report(self, watched: WatchedAttempt, state: JobState) -> None:
        if state.phase in (Phase.QUEUED, Phase.STARTING) and state.progress not in watched.reported:
            watched.reported.add(state.progress)
            self.output.write(PhaseStarted(state.progress))
        for pod, wait in state.waiting.items():
            if ":" in wait:  # Kubernetes gives a reason
                self.report_once(watched, f"pod {pod} waits: {wait}", key=f"{pod} {wait.partition(':')[0]}")

    def report_once(self, watched: WatchedAttempt, text: str, key: str | None = None) -> None:
        if (key or text) not in watched.reported:
            watched.reported.add(key or text)
            self.output.write(Notice(text))

    def write_heartbeat(self, watched: WatchedAttempt, state: JobState, now: float) -> None:
        name = job_name(self.config.name, watched.attempt.number)
        self.cluster.patch(RAY_JOBS, name, {"metadata": {"annotations": {HEARTBEAT: f"{now:.0f}"}}})
        step = watched.events.last
        steps = {} if step is None else {"step": step.step, "steps": step.steps}
        self.record(attempt=watched.attempt.number, phase=state.phase, progress=state.progress, **steps)
        watched.heartbeat = now

    def record(self, **fields: object) -> None:
        self.status.update(**self.figures(), **fields)

    def record_end(self, error: TidemillError) -> None:
        self.status.fail(error, **self.figures())

    def figures(self) -> dict[str, str]:
        return {"gpu_hours": f"{self.usage.hours:.2f}", "updated": f"{self.attempts.clock.time():.0f}"}

    def forward_stop(self, watched: WatchedAttempt, job: Object, now: float) -> None:
        """Tell the driver to stop if a user asks for it or the budget is used up."""
        limit, reason = self.config.kubernetes.gpu_hours, annotations_of(job).get(STOP)
        if watched.stop_reason is not None:
            return
        if limit is not None and self.usage.hours >= limit:
            reason = f"the budget of {limit:g} GPU hours is used up ({self.usage.hours:.2f})"
            watched.stop_by = now + STOP_GRACE_S
        if reason is not None:
            watched.attempt.ask_to_stop(self.store, reason)
            watched.stop_reason = reason
            self.report_once(watched, f"the run ends after the current step, with a checkpoint: {reason}")

    def with_deadlines(self, watched: WatchedAttempt, state: JobState, job: Object | None, now: float) -> JobState:
        """The state; fatal if the attempt was stopped before it started, or a deadline has passed."""
        if job is None or state.over:
            return state
        if watched.stop_reason is not None and state.phase in (Phase.QUEUED, Phase.STARTING):
            return replace(state, fatal=f"stopped before it started: {watched.stop_reason}")
        if watched.stop_by is not None and now > watched.stop_by:
            return replace(
                state,
                fatal=f"{watched.stop_reason}; the run did not end within {STOP_GRACE_S:.0f} s and was deleted",
            )
        limit = self.config.kubernetes.start_timeout_s
        started = seconds((job.get("status") or {}).get("startTime") or job["metadata"]["creationTimestamp"])
        if state.phase is Phase.STARTING and now - started > limit:
            waits = "; ".join(f"{pod}: {wait}" for pod, wait in state.waiting.items()) or "no pod waits"
            return replace(
                state, fatal=f"the cluster does not run after kubernetes.start_timeout_s = {limit} s: {waits}"
            )
        return state
