"""How an attempt ended: with a summary, or with an error that says why and whether another one may do better."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.config.names import attempt_of, job_name, selector
from tidemill.driver.failure import Failure
from tidemill.errors import ClusterError, RunError, StoreError, TidemillError
from tidemill.kuberay.attempts import Attempts
from tidemill.kuberay.cluster import PODS, labels_of, name_of
from tidemill.kuberay.state import NODE_TYPE, JobState, Phase
from tidemill.observe.report import Summary
from tidemill.store.attempt import Attempt

TAIL_LINES = 30


class Lost(Exception):
    """What a driver's traceback says."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The ends of the attempts at one run."""

    attempts: Attempts

    def result(self, attempt: Attempt) -> Summary | None:
        """The summary of an attempt that came to its end; the score of the model is the last that it leaves."""
        if not (self.attempts.store.exists(attempt.summary) and self.attempts.store.exists(attempt.evaluation)):
            return None
        return Summary.from_json(self.attempts.store.get_bytes(attempt.summary).decode())

    def failure(self, attempt: Attempt) -> Failure | None:
        """Why an attempt failed, as it recorded it."""
        if not self.attempts.store.exists(attempt.failure):
            return None
        return Failure.from_json(
            self.attempts.store.get_bytes(attempt.failure).decode(), self.attempts.store.uri(attempt.failure)
        )

    def explain(self, attempt: Attempt, state: JobState) -> TidemillError:
        """The error of an attempt that is over; RunError where another one may do better."""
        failure = self.failure(attempt)
        if failure is not None:
            return remote(failure)
        reason = state.fatal or f"the driver ended without a result: {state.progress}"
        verdict = self.verdict(attempt) if state.phase is Phase.GONE else None
        if verdict is not None:
            return verdict
        if state.phase is Phase.GONE:
            name = job_name(self.attempts.config.name, attempt.number)
            return ClusterError(
                f"RayJob {name} was deleted from outside, as by `tidemill stop --now`. Submit the run again to go on "
                "from its newest checkpoint."
            )
        unheard = state.phase in (Phase.RUNNING, Phase.FAILED) and "\n" not in reason  # else it has the driver's words
        log = self.last_words(attempt.number) if unheard else ""
        told = f"{reason}\n{log}" if log else reason
        if state.retryable or (state.fatal is None and state.phase is not Phase.SUCCEEDED):
            return RunError(told)
        return ClusterError(told)

    def give_up(self, attempt: Attempt, error: TidemillError) -> None:
        """Record that no attempt follows, so that a step that is tried again says the same and begins none."""
        try:
            self.attempts.store.put_bytes(attempt.verdict, str(error).encode())
        except StoreError as unrecorded:
            error.add_note(f"This could not be recorded, so another try of the step begins anew: {unrecorded}")

    def verdict(self, attempt: Attempt) -> ClusterError | None:
        """What `give_up` recorded."""
        if not self.attempts.store.exists(attempt.verdict):
            return None
        return ClusterError(self.attempts.store.get_bytes(attempt.verdict).decode())

    def last_words(self, number: int) -> str:
        """The end of the driver's log, from the pod that follows it, else of the head's."""
        pods = [
            pod
            for pod in self.attempts.cluster.list(PODS, selector(self.attempts.config.name))
            if attempt_of(labels_of(pod)) == number and labels_of(pod).get(NODE_TYPE) in (None, "head")
        ]
        for pod in sorted(pods, key=lambda pod: labels_of(pod).get(NODE_TYPE, "")):
            text = self.attempts.cluster.log(name_of(pod), lines=TAIL_LINES).strip()
            if text:
                return f"the last lines of pod {name_of(pod)}:\n{text}"
        return ""


def remote(failure: Failure) -> TidemillError:
    """The error of a driver, with its traceback as the cause."""
    text = failure.message if failure.expected else f"{failure.error}: {failure.message}\n{failure.origin.strip()}"
    error: TidemillError = RunError(text) if failure.retryable else TidemillError(text)
    error.__cause__ = Lost(failure.trace)
    return error
