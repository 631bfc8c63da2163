"""The books of the rollout side: what became of every occurrence, why, and what it cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tidemill.config.run import RunConfig
from tidemill.records import Completion
from tidemill.rollout.activity import Tally
from tidemill.rollout.failures import FlightFailure, Suspects
from tidemill.rollout.in_flight import Flight, tokens_of
from tidemill.rollout.ledger import Ledger

LOG = logging.getLogger(__name__)


class Books:
    """Keeps the ledger, the counts since the last step, and what was sampled in vain.

    Args:
        config: of the run.
        ledger: new, or restored from a checkpoint.
        queued: gets the `usable_version` of every group that is in the queue or on its way into it, by uid.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, queued: dict[int, int]) -> None:
        self._config, self._ledger, self._queued = config, ledger, queued
        self.tally, self.suspects = Tally(), Suspects(ledger, config.rollout.max_attempts)
        self._sampled: dict[int, int] = {}  # tokens of every group that is finished and not trained yet, by uid

    def too_long(self, uid: int, tokens: int) -> None:
        """A prompt is longer than the run takes."""
        limit = self._config.data.max_prompt_tokens
        self._ledger.quarantine(uid, "too_long")
        self.tally.count("skipped/too_long")
        LOG.warning("prompt occurrence %d skipped: %d tokens, data.max_prompt_tokens is %d", uid, tokens, limit)

    def generated(self, uid: int, completions: Sequence[Completion]) -> None:
        """An engine has returned a group."""
        self.suspects.generated()
        self._sampled[uid] = tokens_of(completions)

    def queued(self, uid: int, usable_version: int) -> None:
        """A group is on its way to the trainer."""
        self._ledger.queued(uid)
        self._queued[uid] = usable_version

    def trained(self, uids: Sequence[int]) -> None:
        """These occurrences are in the parameters now.

        Raises:
            RunError: one of them was trained before or never queued.
        """
        self._ledger.trained(uids)
        for uid in uids:
            self._queued.pop(uid, None)
            self._sampled.pop(uid, None)

    def dropped(self, uids: Sequence[int], reason: str) -> None:
        """These were lost on their way for no fault of their own, and are issued again."""
        for uid in uids:
            self._ledger.dropped(uid, reason)
            self._queued.pop(uid, None)
            self.tally.count(f"dropped/{reason}")
            self.waste(self._sampled.pop(uid, 0))

    def failed(self, uid: int, failure: FlightFailure) -> None:
        """An attempt failed: it is issued again, or set aside after too many."""
        self.waste(self._sampled.pop(uid, 0))
        limit = self._config.rollout.max_attempts
        quarantined = self._ledger.failed(uid, failure.reason, limit)
        self.tally.count(f"failed/{failure.reason}")
        fate = f"quarantined after {limit} attempts" if quarantined else "issued again"
        LOG.warning("prompt occurrence %d: %s, %s: %r", uid, failure.reason, fate, failure.__cause__)

    def crashed(self, flight: Flight) -> None:
        """Its engine died under it: no fault of the prompt, unless that happens to it time after time.

        Raises:
            EngineError: see `Suspects.crashed`.
        """
        if self.suspects.crashed(flight.uid, str(flight.engine)):
            self.tally.count("skipped/kills_engine")
            LOG.warning(
                "prompt occurrence %d skipped: %d engines in a row died while they generated it, the last one, %s, "
                "with nothing beside it",
                *(flight.uid, self.suspects.max_crashes, flight.engine),
            )
        else:
            self.tally.count("dropped/engine_lost")

    def outlasted(self, uid: int) -> None:
        """A group became too old while it was generated; one that always does must not take a slot for ever."""
        limit = self._config.rollout.max_attempts
        self.tally.count("cancelled/stale")
        if self._ledger.outlasted(uid, limit):
            self.tally.count("skipped/never_fits")
            LOG.warning(
                "prompt occurrence %d skipped: %d times in a row its generation outlasted asynchrony.max_staleness = "
                "%d versions; raise it, or asynchrony.trigger_parameter_sync_step",
                *(uid, limit, self._config.asynchrony.max_staleness),
            )
        else:
            self.tally.count("dropped/stale")

    def cancelled(self, uid: int, reason: str) -> None:
        """A group was given up before it was finished; it is issued again."""
        self.tally.count(f"cancelled/{reason}")
        self.dropped([uid], reason)

    def waste(self, tokens: int) -> None:
        """Tokens were sampled that will not be trained."""
        if tokens:
            self.tally.count("wasted_tokens", tokens)

    def take(self) -> Mapping[str, float]:
        """What `Tally.take` returns, and the ledger's counts as `ledger/NAME`."""
        return self.tally.take() | {f"ledger/{name}": float(n) for name, n in self._ledger.counts().items()}
