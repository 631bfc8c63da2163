"""How an attempt begins: within the budget, and not for a run that was ended.

A watcher and whoever ends the run do not wait for each other. Who ends it closes the board first and deletes then what
there is; the watcher makes the RayJob first and looks at the board then. So one of the two sees what the other did.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.errors import ClusterError
from tidemill.kuberay import budget
from tidemill.kuberay.attempts import Attempts
from tidemill.kuberay.run_status import Board


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginnings of the attempts at one run."""

    attempts: Attempts
    meter: budget.Meter
    board: Board

    def of_pipeline(self) -> int:
        """The number of the attempt under way, else of the one that begins now, whatever ended the run before.

        Raises:
            ClusterError: the budget is used up, or the run was ended at this moment.
        """
        self.board.open()
        number = self.attempts.under_way()
        if number is None:
            self.refuse_without_budget()
            number = self.attempts.begin_next()
        self.refuse_ended(number)
        return number

    def of(self, number: int) -> None:
        """Begin a further attempt.

        Raises:
            ClusterError: the budget is used up, or the run was ended or told to end while there was no attempt.
        """
        self.refuse_without_budget()
        reason = self.board.closed()
        if reason is not None:
            raise ClusterError(f"no further attempt begins: {reason}. Submit the run again to go on.")
        self.attempts.begin(number)
        self.refuse_ended(number)

    def refuse_ended(self, number: int) -> None:
        """Delete an attempt at a run that was ended meanwhile.

        Raises:
            ClusterError: it was.
        """
        reason = self.board.ended()
        if reason is not None:
            self.attempts.remove(number)
            raise ClusterError(f"attempt {number} is deleted: {reason}. Submit the run again to go on.")

    def refuse_without_budget(self) -> None:
        """Begin nothing that has to be ended at once.

        Raises:
            ClusterError: the budget is used up.
        """
        limit = self.attempts.config.kubernetes.gpu_hours
        if limit is not None and self.meter.hours >= limit:
            raise ClusterError(
                f"the budget of {limit:g} GPU hours (kubernetes.gpu_hours) is used up: {self.meter.hours:.2f}. Raise "
                "it to go on from the newest checkpoint."
            )
