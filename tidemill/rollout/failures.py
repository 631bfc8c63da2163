"""When failures are the run's fault and not a prompt's: streaks of them, and a run in which nothing finishes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from tidemill.errors import DataError, EngineError, RewardError, RunError, TidemillError
from tidemill.rollout.activity import Clock
from tidemill.rollout.in_flight import Flight
from tidemill.rollout.ledger import Ledger

LOG = logging.getLogger(__name__)

LOSSES = 3  # engines of one place, one after the other, that finish nothing
LOSSES_WITHIN_S = 3600.0
FIRST_FAILURES = 8  # distinct prompts in a row
LATER_FAILURES = 32  # of a reward that has worked before: a few bad prompts may stand together
NAMED = 5  # occurrences that a message names
BLAMED: dict[str, type[TidemillError]] = {
    "engine_error": EngineError,
    "reward_error": RewardError,
    "reward_timeout": RewardError,
}


class FlightFailure(Exception):
    """An attempt at a group failed for `reason`; the cause, if any, is chained. Never leaves the rollouter."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class FailureStreak:
    """Ends a run whose reward or whose engines do not work (any more), instead of quarantining every prompt.

    Args:
        total: occurrences in the stream, None if unlimited; a short stream fails sooner.
        concurrent: groups that engines run at once; so many may fail together when one engine dies, while the
            others are well.
        rows: of the data; as many prompts in a row that are too long are all there are.
    """

    def __init__(self, total: int | None, concurrent: int, rows: int) -> None:
        self._total, self._concurrent, self._rows = total, concurrent, rows
        self._rewarded = False
        self._failed: dict[type[TidemillError], list[int]] = {EngineError: [], RewardError: []}
        self._too_long = 0

    def generated(self) -> None:
        """An engine has returned a group."""
        self._failed[EngineError].clear()

    def rewarded(self) -> None:
        """A group has been scored: the reward works, so that what fails next may be its prompt's fault."""
        self._rewarded = True
        self._failed[RewardError].clear()

    def failed(self, uid: int, failure: FlightFailure) -> None:
        """Count a failure.

        Raises:
            EngineError: the engines fail for one prompt after the other.
            RewardError: the reward does.
        """
        kind = BLAMED.get(failure.reason)
        if kind is None:
            return
        uids = self._failed[kind]
        uids.append(uid)
        grace = self._concurrent if kind is EngineError else 0
        limit = LATER_FAILURES if kind is RewardError and self._rewarded else FIRST_FAILURES
        distinct = limit if self._total is None else min(limit, self._total)
        if len(set(uids)) >= distinct and len(uids) >= distinct + grace:
            raise kind(
                f"{len(set(uids))} prompts in a row failed and none succeeded; the last one, occurrence {uid} "
                f"({failure.reason}): {failure.__cause__}"
            ) from failure.__cause__

    def fits(self) -> None:
        """A prompt is short enough."""
        self._too_long = 0

    def too_long(self, limit: int) -> None:
        """A prompt has more than `limit` tokens.

        Raises:
            DataError: all have.
        """
        self._too_long += 1
        if self._too_long >= self._rows:
            raise DataError(f"every prompt is longer than data.max_prompt_tokens = {limit}; raise it")


class Suspects:
    """Finds the prompt that kills its engine among those that were in flight beside it.

    Whatever an engine was generating when it crashed is suspect, and cleared when another one finishes it. Nothing is
    blamed for one crash. What has been there at all crashes but one of those that condemn is generated alone, so that
    the last one condemns one prompt and not its neighbours. An engine that was lost with its pod or machine did not
    crash, or prompts that take long would be set aside where pods are often evicted.

    Args:
        ledger: counts the crashes under every occurrence, over restarts too.
        max_attempts: `rollout.max_attempts`, see `condemning`.
    """

    def __init__(self, ledger: Ledger, max_attempts: int) -> None:
        self._ledger, self.max_crashes = ledger, condemning(max_attempts)
        self._explained: Counter[str] = Counter()
        self._condemned: list[int] = []

    def must_wait(self, uid: int, flights: Iterable[Flight]) -> bool:
        """Whether an occurrence may not start beside these."""
        others = [flight.uid for flight in flights if flight.stage == "generating"]
        return bool(others) and any(map(self._suspected, [uid, *others]))

    def generated(self) -> None:
        """An engine has returned a group."""
        self._condemned.clear()

    def crashed(self, uid: int, engine: str) -> bool:
        """The engine died while it generated an occurrence. Returns whether that is to blame and set aside.

        Raises:
            EngineError: one prompt after the other is to blame, so that it is not the prompts.
        """
        if not self._ledger.crashed(uid, self.max_crashes):
            return False
        self._explained[engine] += 1
        self._condemned.append(uid)
        if len(self._condemned) >= LOSSES:
            raise EngineError(
                f"{LOSSES} prompts in a row, occurrences {self._condemned}, killed {self.max_crashes} engines each, "
                f"the last one {engine}, and nothing else was finished in between. The notices of this run and the "
                "engines' logs say what they died of."
            )
        return True

    def explained(self, engine: str) -> int:
        """How many prompts were set aside for the death of this engine; asked once."""
        return self._explained.pop(engine, 0)

    def _suspected(self, uid: int) -> bool:
        return self._ledger.crashes(uid) >= self.max_crashes - 1


class HeldOutSuspects:
    """`Suspects` among the held-out prompts, which are asked again for every version.

    A suspect is asked while no engine has anything else, so that one more crash condemns it. What is condemned is not
    asked again in this process.

    Args:
        max_attempts: `rollout.max_attempts`.
    """

    def __init__(self, max_attempts: int) -> None:
        self.max_crashes = condemning(max_attempts)
        self._crashes: Counter[int] = Counter()
        self._explained: Counter[str] = Counter()
        self._answered = False

    def suspected(self, row: int) -> bool:
        """Whether a prompt is to be asked alone."""
        return self._crashes[row] >= self.max_crashes - 1

    @property
    def waiting(self) -> bool:
        """Whether there is a suspect that is not condemned."""
        return any(self.suspected(row) and not self.condemned(row) for row in list(self._crashes))

    def condemned(self, row: int) -> bool:
        """Whether a prompt is set aside."""
        return self._crashes[row] >= self.max_crashes

    def answered(self, row: int) -> None:
        """An engine has answered a prompt."""
        self._answered = True
        del self._crashes[row]

    def crashed(self, row: int, engine: str) -> None:
        """The engine died while it answered a prompt."""
        self._crashes[row] += 1
        if self.condemned(row):
            self._explained[engine] += 1
            LOG.warning(
                "held-out prompt %d skipped: %d engines died while they answered it, the last one, %s, with nothing "
                "beside it",
                *(row, self.max_crashes, engine),
            )

    def check(self) -> None:
        """See that it is some prompts and not the engines.

        Raises:
            EngineError: one prompt after the other is to blame.
        """
        condemned = sorted(filter(self.condemned, self._crashes))
        if len(condemned) >= (FIRST_FAILURES if self._answered else LOSSES):
            raise EngineError(
                f"{len(condemned)} held-out prompts, rows {condemned}, killed {self.max_crashes} engines each: so "
                f"many are hardly the prompts' fault. The engines' logs say what they died of."
            )

    def explained(self, engine: str) -> int:
        """How many prompts were set aside for the death of this engine; asked once."""
        return self._explained.pop(engine, 0)


def condemning(max_attempts: int) -> int:
    """Crashes that condemn a prompt: at least two, and no more than a `CrashLoop` allows."""
    return min(max(2, max_attempts), LOSSES)


class CrashLoop:
    """Tells engines that die for ever from one that has died.

    A *place* is that of an engine and of all that replace it. Its engines must not die `LOSSES` times within
    `LOSSES_WITHIN_S` without any of them finishing a request. What other places do does not excuse it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._barren: dict[str, list[float]] = {}

    def lost(self, place: str, finished: int) -> int:
        """Count the loss of an engine that had finished so many requests.

        Returns:
            How many have been lost there without finishing anything, lately and in a row.
        """
        now = self._clock()
        recent = [] if finished else [at for at in self._barren.get(place, []) if now - at < LOSSES_WITHIN_S] + [now]
        self._barren[place] = recent
        return len(recent)


class Watchdog:
    """Ends a run in which groups are running and none finishes.

    Args:
        group_timeout_s: of one group; twice as long without a finished one is too long.
        clock: monotonic seconds.
    """

    def __init__(self, group_timeout_s: float, clock: Clock) -> None:
        self._limit, self._clock = 2 * group_timeout_s, clock
        self._progress_at = clock()

    def progress(self) -> None:
        """A group was finished."""
        self._progress_at = self._clock()

    def look(self, flights: Iterable[Flight]) -> None:
        """Check; groups that only wait for room in the queue are finished.

        Raises:
            RunError: naming the occurrences that run longest.
        """
        running = sorted((f for f in flights if f.stage != "delivering"), key=lambda flight: flight.number)
        if not running:
            self.progress()
        elif self._clock() - self._progress_at > self._limit:
            raise RunError(
                f"no group finished for {self._limit:g} s while {len(running)} were running; the oldest are "
                f"occurrences {[flight.uid for flight in running[:NAMED]]}. Look at the engines' logs; if they are "
                f"only slow, raise rollout.group_timeout_s = {self._limit / 2:g}."
            )
