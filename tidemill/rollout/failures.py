"""Failures that end the run, or quarantine a prompt because it crashes engines."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from tidemill.errors import DataError, EngineError, RewardError, RunError, TidemillError
from tidemill.records import EngineId
from tidemill.rollout.group_request import Clock, GroupRequest, RequestFailed
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import UnusablePromptError

LOG = logging.getLogger(__name__)

LOSSES = 3  # of engines in one slot, one after the other, that finish nothing
LOSSES_WITHIN_S = 3600.0
FIRST_FAILURES = 8  # distinct prompts in a row
LATER_FAILURES = 32  # of a reward that has worked before: a few bad prompts may follow each other
NAMED = 5  # occurrences that a message names
ERROR_OF_REASON: dict[str, type[TidemillError]] = {
    "engine_error": EngineError,
    "reward_error": RewardError,
    "reward_timeout": RewardError,
}


class FailureStreak:
    """Ends a run whose reward or engines do not work, instead of quarantining every prompt.

    Args:
        total: occurrences in the stream, None if unlimited; a short stream fails sooner.
        concurrent: groups that all engines run at once. This many may fail together when one engine dies while the
            others work.
        rows: of the data; this many unusable prompts in a row are all prompts.
    """

    def __init__(self, total: int | None, concurrent: int, rows: int) -> None:
        self._total, self._concurrent, self._rows = total, concurrent, rows
        self._rewarded = False
        self._failed: dict[type[TidemillError], list[int]] = {EngineError: [], RewardError: []}
        self._unusable = 0

    def generated(self) -> None:
        self._failed[EngineError].clear()

    def rewarded(self) -> None:
        """A group has been scored, so the reward works; the next failure may be its prompt's fault."""
        self._rewarded = True
        self._failed[RewardError].clear()

    def failed(self, uid: int, failure: RequestFailed) -> None:
        kind = ERROR_OF_REASON.get(failure.reason)
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

    def usable(self) -> None:
        self._unusable = 0

    def unusable(self, error: UnusablePromptError) -> None:
        """A prompt is too long or cannot be rendered.

        Raises:
            DataError: all prompts are.
        """
        self._unusable += 1
        if self._unusable >= self._rows:
            raise DataError(f"none of the {self._rows} prompts can be used. The last one is {error}")


class CrashQuarantine:
    """Finds the prompt that crashes its engine among the prompts that the engine generated at the same time.

    The ledger counts, for every occurrence and over restarts, the engine crashes in a row during its generation. One
    crash proves nothing. An occurrence that one more crash would quarantine is generated alone, so that its neighbours
    are not quarantined with it. The loss of a pod or machine is not a crash: otherwise prompts that take long would be
    quarantined where pods are often evicted.
    """

    def __init__(self, ledger: Ledger, max_attempts: int) -> None:
        self._ledger, self.max_crashes = ledger, crash_limit(max_attempts)
        self._quarantined_by: Counter[EngineId] = Counter()
        self._in_a_row: list[int] = []

    def must_wait(self, uid: int, in_flight: Iterable[GroupRequest]) -> bool:
        others = [request.uid for request in in_flight if request.stage == "generating"]
        return bool(others) and any(map(self._must_run_alone, [uid, *others]))

    def generated(self) -> None:
        self._in_a_row.clear()

    def crashed(self, uid: int, engine: EngineId) -> bool:
        """The engine crashed while it generated an occurrence. Returns whether the occurrence is quarantined for it.

        Raises:
            EngineError: so many occurrences in a row are quarantined that the prompts cannot be the cause.
        """
        if not self._ledger.crashed(uid, self.max_crashes):
            return False
        self._quarantined_by[engine] += 1
        self._in_a_row.append(uid)
        if len(self._in_a_row) >= LOSSES:
            raise EngineError(
                f"{LOSSES} prompts in a row, occurrences {self._in_a_row}, crashed {self.max_crashes} engines each, "
                f"the last one {engine}, and no other prompt was finished in between. Read the causes in the notices "
                "of this run and in the engines' logs."
            )
        return True

    def take_quarantined(self, engine: EngineId) -> int:
        """How many prompts were quarantined for the crash of this engine, since the last call."""
        return self._quarantined_by.pop(engine, 0)

    def _must_run_alone(self, uid: int) -> bool:
        return self._ledger.crashes(uid) >= self.max_crashes - 1


class HeldOutCrashQuarantine:
    """`CrashQuarantine` for the held-out prompts, which are generated again for every evaluation.

    A prompt that one more crash would quarantine is generated while no engine has another request. A quarantined
    prompt is left out of all evaluations of this process.
    """

    def __init__(self, max_attempts: int) -> None:
        self.max_crashes = crash_limit(max_attempts)
        self._crashes: Counter[int] = Counter()
        self._quarantined_by: Counter[EngineId] = Counter()
        self._answered = False

    def must_run_alone(self, row: int) -> bool:
        return self._crashes[row] >= self.max_crashes - 1

    @property
    def pending(self) -> bool:
        """Whether a prompt must run alone and is not quarantined."""
        return any(self.must_run_alone(row) and not self.quarantined(row) for row in list(self._crashes))

    def quarantined(self, row: int) -> bool:
        return self._crashes[row] >= self.max_crashes

    def answered(self, row: int) -> None:
        self._answered = True
        del self._crashes[row]

    def crashed(self, row: int, engine: EngineId) -> None:
        self._crashes[row] += 1
        if self.quarantined(row):
            self._quarantined_by[engine] += 1
            LOG.warning(
                "held-out prompt %d skipped: %d engines crashed while they answered it; the last one, %s, had no other "
                "request",
                *(row, self.max_crashes, engine),
            )

    def check(self) -> None:
        """Make sure that the quarantined prompts are few enough to be the cause of the crashes."""
        quarantined = sorted(filter(self.quarantined, self._crashes))
        if len(quarantined) >= (FIRST_FAILURES if self._answered else LOSSES):
            raise EngineError(
                f"{len(quarantined)} held-out prompts, rows {quarantined}, crashed {self.max_crashes} engines each. So "
                "many prompts are hardly the cause; read it in the engines' logs."
            )

    def take_quarantined(self, engine: EngineId) -> int:
        return self._quarantined_by.pop(engine, 0)


def crash_limit(max_attempts: int) -> int:
    """Crashes that quarantine a prompt: at least two, and no more than a `CrashLoop` allows."""
    return min(max(2, max_attempts), LOSSES)


class CrashLoop:
    """Distinguishes a slot whose engines keep dying from one whose engine died once.

    The engines of one slot, an engine and all that replace it one after the other, must not die `LOSSES` times within
    `LOSSES_WITHIN_S` without any of them finishing a request. Requests finished in other slots do not count.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._losses: dict[EngineId, list[float]] = {}

    def lost(self, slot: EngineId, finished: int) -> int:
        """Count the loss of an engine that had finished this many requests.

        Returns:
            Number of recent losses in a row in this slot without a finished request.
        """
        now = self._clock()
        recent = [] if finished else [at for at in self._losses.get(slot, []) if now - at < LOSSES_WITHIN_S] + [now]
        self._losses[slot] = recent
        return len(recent)


class Watchdog:
    """Ends a run in which groups are in flight and none finishes for twice the time-out of a group."""

    def __init__(self, group_timeout_s: float, clock: Clock) -> None:
        self._limit, self._clock = 2 * group_timeout_s, clock
        self._progress_at = clock()

    def progress(self) -> None:
        self._progress_at = self._clock()

    def check(self, in_flight: Iterable[GroupRequest]) -> None:
        """Check the time since the last finished group. A group that only waits for room in the queue is finished."""
        running = sorted((r for r in in_flight if r.stage != "delivering"), key=lambda request: request.number)
        if not running:
            self.progress()
        elif self._clock() - self._progress_at > self._limit:
            raise RunError(
                f"no group finished for {self._limit:g} s while {len(running)} were running; the oldest are "
                f"occurrences {[request.uid for request in running[:NAMED]]}. Look at the engines' logs; if they "
                f"are only slow, raise rollout.group_timeout_s = {self._limit / 2:g}."
            )
