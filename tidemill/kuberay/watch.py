"""Watches a run on Kubernetes from its first attempt to its end. The training does not need it: it may be killed and
started again at any moment, and goes on with whatever it finds.

    RayJob, pods ─► state ─► what to do ─► wait on, end it, or the next attempt
    store        ─► events ─► log of the step        annotation, budget ─► stop.json in the store
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tidemill.config.names import HEARTBEAT, STOP, attempt_of, job_name, selector
from tidemill.config.run import RunConfig
from tidemill.errors import RunError, StoreError, TidemillError
from tidemill.kuberay import budget
from tidemill.kuberay.attempts import Attempts, ended_at
from tidemill.kuberay.beginning import Beginning
from tidemill.kuberay.cluster import EVENTS, PODS, RAY_JOBS, Cluster, Object, annotations_of, labels_of
from tidemill.kuberay.ending import Ending
from tidemill.kuberay.mirror import Mirror, Screen
from tidemill.kuberay.run_status import FAILED, Board
from tidemill.kuberay.state import JobState, Phase, assess, seconds
from tidemill.observe.events import Notice, PhaseStarted
from tidemill.observe.markdown import cluster_rows
from tidemill.observe.report import Summary
from tidemill.retry import OUTAGE_S
from tidemill.store.attempt import Attempt
from tidemill.store.object_store import ObjectStore

POLL_S = 5.0
BEAT_S = 30.0
STOP_GRACE_S = 900.0
"""So long may a run take for step, checkpoint and export after it was told to stop for its budget."""


@dataclass(slots=True)
class Visit:
    """What a watcher remembers of the attempt that it is at.

    Attributes:
        attempt: which.
        mirror: of its events.
        said: lines that were told already.
        beaten: when the heartbeat was last written.
        stopping: why the attempt was told to end, None while it was not.
        stop_by: when it must have ended, None without a deadline.
        away_since: since when API server or store have not answered, None while they do.
    """

    attempt: Attempt
    mirror: Mirror
    said: set[str] = field(default_factory=set)
    beaten: float = 0.0
    stopping: str | None = None
    stop_by: float | None = None
    away_since: float | None = None


@dataclass(slots=True)
class Watcher:
    """Follows the attempts at a run to the end of the last one."""

    attempts: Attempts
    screen: Screen
    meter: budget.Meter
    board: Board

    @property
    def config(self) -> RunConfig:
        """Of the run."""
        return self.attempts.config

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self.attempts.cluster

    @property
    def store(self) -> ObjectStore:
        """Where it leaves what it makes."""
        return self.attempts.store

    @property
    def beginning(self) -> Beginning:
        """How they begin."""
        return Beginning(self.attempts, self.meter, self.board)

    @property
    def ending(self) -> Ending:
        """How they end."""
        return Ending(self.attempts)

    def provision(self) -> int:
        """The number of the attempt under way; where there is none, the next one is begun.

        Raises:
            ClusterError: the budget is used up, or the run was ended at this moment.
        """
        try:
            number = self.beginning.of_pipeline()
        except TidemillError as error:
            self.post_end(error)
            raise
        where = "\n".join(f"{what}: {where}" for what, where in cluster_rows(self.config))
        self.post(attempt=number, phase=Phase.STARTING, links=where, error=None)
        return number

    def follow(self, first: int) -> Summary:
        """Watch until the run has ended, with new attempts where one failed in a way that may pass.

        Args:
            first: attempt that this pipeline run began with; what earlier ones left is not its result.

        Raises:
            RunError: the last of the attempts failed, and another might do better.
            TidemillError: it failed, and another would too; it was deleted, or out of budget.
        """
        try:
            if self.board.given_back():  # a person has KFP try the steps of a pipeline that was over again
                first = self.provision()
            summary = self.followed(first, self.entry(first))
        except TidemillError as error:
            self.post_end(error)
            raise
        self.post(phase=Phase.SUCCEEDED, progress=None, step=summary.steps, error=None)
        return summary

    def followed(self, first: int, number: int) -> Summary:
        """The end of an attempt or of one of those after it."""
        last = first + self.config.kubernetes.max_restarts
        while True:
            visit = self.visit(number)
            state = self.attend(visit)
            summary = self.ending.result(visit.attempt)
            if summary is not None:
                return summary
            error = self.explain(visit, state)
            final = not isinstance(error, RunError) or number >= last or visit.stopping is not None
            if final:  # recorded first: a watcher that is killed while the pods end must not begin another attempt
                self.ending.give_up(visit.attempt, error)
            else:
                self.post(failure=f"attempt {number}: {error}", **{FAILED: number})
            self.release(number, error)
            if final:
                raise error
            cause, *_ = str(error).splitlines()
            self.screen.tell(Notice(f"attempt {number} failed, {last - number} more: {cause}"))
            number = self.entry(number)  # another watcher may have gone ahead

    def explain(self, visit: Visit, state: JobState) -> TidemillError:
        """The error of an attempt that is over; what another watcher took away was not deleted from outside."""
        number = visit.attempt.number
        if state.phase is Phase.GONE and self.board.facts().get(FAILED) == str(number):
            return RunError(f"another watcher has taken away RayJob {job_name(self.config.name, number)}, which failed")
        return self.ending.explain(visit.attempt, state)

    def release(self, number: int, error: TidemillError) -> None:
        """Delete what a failed attempt holds.

        Raises:
            RunError: that does not go; it names the failure too.
        """
        try:
            self.attempts.remove(number)
        except RunError as left:
            raise RunError(f"{error}\nWhat is more, its cluster does not go away: {left}") from error.__cause__

    def entry(self, first: int) -> int:
        """Which attempt to watch, not before `first`: the live one, the one that ended meanwhile, or a new one.

        Raises:
            ClusterError: the run was ended, or another watcher, such as that of an earlier try, gave it up.
        """
        number = self.attempts.live()
        if number is not None:
            self.beginning.refuse_ended(number)
            return number
        last = max(first, self.attempts.last())
        newest = Attempt(self.config.name, last)
        verdict = self.ending.verdict(newest)
        if verdict is not None:
            raise verdict
        if self.ending.failure(newest) is None and self.ending.result(newest) is not None:
            return last
        self.beginning.of(last + 1)
        return last + 1

    def visit(self, number: int) -> Visit:
        """Turn to an attempt."""
        attempt = Attempt(self.config.name, number)
        self.screen.tell(PhaseStarted(f"attempt {number}: RayJob {job_name(self.config.name, number)}"))
        return Visit(attempt, Mirror.of(self.store, attempt, self.screen))

    def attend(self, visit: Visit) -> JobState:
        """Look at an attempt every few seconds until it is over.

        Raises:
            RunError, StoreError: API server or store were away for too long.
            ClusterError: the API server refuses us.
        """
        clock = self.attempts.clock
        while True:
            try:
                state = self.look(visit)
                visit.away_since = None
            except (RunError, StoreError) as error:
                visit.away_since = visit.away_since or clock.time()
                if clock.time() - visit.away_since > OUTAGE_S:
                    raise
                self.say(visit, f"{error}; the run goes on, and the watch too once it answers")
            else:
                if state.over:
                    return state
            clock.sleep(POLL_S)

    def look(self, visit: Visit) -> JobState:
        """One look, and what follows from it. The sign of life comes first: the store may be away, and for long."""
        now = self.attempts.clock.time()
        pods = self.cluster.list(PODS, selector(self.config.name))
        job = self.cluster.get(RAY_JOBS, job_name(self.config.name, visit.attempt.number))
        own = [pod for pod in pods if attempt_of(labels_of(pod)) == visit.attempt.number]
        state = assess(job, own, self.events(own), now)
        self.meter.see(pods, self.config.kubernetes.gpu_resource, now, ended_at(job))
        due = now - visit.beaten >= BEAT_S
        if due and not state.over:
            self.beat(visit, state, now)
        visit.mirror.catch_up()
        self.report(visit, state)
        if due or state.over:
            budget.save(self.meter, self.store, self.config.name)
        if job is not None and not state.over:
            self.pass_on_stop(visit, job, now)
        return self.in_time(visit, state, job, now)

    def events(self, pods: Sequence[Object]) -> Sequence[Object]:
        """Events of the namespace, asked for only while a pod waits: there may be very many."""
        if pods and all(pod["status"].get("phase") != "Pending" for pod in pods):
            return ()
        return self.cluster.list(EVENTS)

    def report(self, visit: Visit, state: JobState) -> None:
        """Tell what is new about the attempt and its pods."""
        if state.phase in (Phase.QUEUED, Phase.STARTING) and state.progress not in visit.said:
            visit.said.add(state.progress)
            self.screen.tell(PhaseStarted(state.progress))
        for pod, wait in state.waiting.items():
            if ":" in wait:  # Kubernetes gives a reason
                self.say(visit, f"pod {pod} waits: {wait}", key=f"{pod} {wait.partition(':')[0]}")

    def say(self, visit: Visit, text: str, key: str | None = None) -> None:
        """Tell something once."""
        if (key or text) not in visit.said:
            visit.said.add(key or text)
            self.screen.tell(Notice(text))

    def beat(self, visit: Visit, state: JobState, now: float) -> None:
        """Leave a sign of life at the RayJob, and what it has cost."""
        name = job_name(self.config.name, visit.attempt.number)
        self.cluster.patch(RAY_JOBS, name, {"metadata": {"annotations": {HEARTBEAT: f"{now:.0f}"}}})
        step = visit.mirror.last
        steps = {} if step is None else {"step": step.step, "steps": step.steps}
        self.post(attempt=visit.attempt.number, phase=state.phase, progress=state.progress, **steps)
        visit.beaten = now

    def post(self, **facts: object) -> None:
        """Note what `tidemill status` says of the run."""
        self.board.post(**self.figures(), **facts)

    def figures(self) -> dict[str, str]:
        """What the run has cost, and when that was."""
        return {"gpu_hours": f"{self.meter.hours:.2f}", "updated": f"{self.attempts.clock.time():.0f}"}

    def post_end(self, error: TidemillError) -> None:
        """Note why the run ended."""
        self.board.fail(error, **self.figures())

    def pass_on_stop(self, visit: Visit, job: Object, now: float) -> None:
        """Tell the driver to end, where a person asks for it or the budget is used up."""
        limit, reason = self.config.kubernetes.gpu_hours, annotations_of(job).get(STOP)
        if visit.stopping is not None:
            return
        if limit is not None and self.meter.hours >= limit:
            reason = f"the budget of {limit:g} GPU hours is used up ({self.meter.hours:.2f})"
            visit.stop_by = now + STOP_GRACE_S
        if reason is not None:
            visit.attempt.ask_to_stop(self.store, reason)
            visit.stopping = reason
            self.say(visit, f"the run ends after the step under way, with a checkpoint: {reason}")

    def in_time(self, visit: Visit, state: JobState, job: Object | None, now: float) -> JobState:
        """The state, which is fatal too where the attempt is stopped before it began, or a deadline has passed."""
        if job is None or state.over:
            return state
        if visit.stopping is not None and state.phase in (Phase.QUEUED, Phase.STARTING):
            return replace(state, fatal=f"stopped before it began: {visit.stopping}")
        if visit.stop_by is not None and now > visit.stop_by:
            return replace(
                state, fatal=f"{visit.stopping}; the run did not end within {STOP_GRACE_S:.0f} s and was deleted"
            )
        limit = self.config.kubernetes.start_timeout_s
        began = seconds((job.get("status") or {}).get("startTime") or job["metadata"]["creationTimestamp"])
        if state.phase is Phase.STARTING and now - began > limit:
            waits = "; ".join(f"{pod}: {wait}" for pod, wait in state.waiting.items()) or "no pod waits"
            return replace(
                state, fatal=f"the cluster does not run after kubernetes.start_timeout_s = {limit} s: {waits}"
            )
        return state
