"""The ledger: the state of every prompt occurrence. Pure bookkeeping, no I/O.

An occurrence (`uid`) is waiting, dispatched, queued, trained or quarantined. It waits after it was dropped, or when a
later one was dispatched before it:

    waiting ──dispatched──► dispatched ──queued──► queued ──trained──► trained
       ▲                        │  │                 │
       └──── dropped, failed ───┘  └─ quarantine     └── dropped ──► waiting

An *issue* is one dispatch attempt. An occurrence that is dropped twice and trained at the third attempt was issued
three times, dropped twice and trained once. At every moment

    issued == trained + sum(dropped by reason) + quarantined + in flight (dispatched or queued).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, count, islice
from typing import Any, Literal

from tidemill.errors import CheckpointError, RunError

Stage = Literal["dispatched", "queued"]


class Ledger:
    """Accounts for the occurrences `0, 1, ...` of a prompt stream, each trained exactly once.

    Args:
        total: number of occurrences, or None for an unlimited stream.
    """

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._cursor = 0
        self._waiting: list[int] = []
        self._in_flight: dict[int, Stage] = {}
        self._issued = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._quarantined: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self._outlasted: dict[int, int] = {}
        self._crashed: dict[int, int] = {}

    def next_uid(self) -> int | None:
        """The occurrence to dispatch next: the lowest that waits, else a new one; None at the end of the stream."""
        if self._waiting:
            return self._waiting[0]
        if self.total is not None and self._cursor >= self.total:
            return None
        return self._cursor

    def upcoming(self, most: int) -> list[int]:
        """The next `most` occurrences in the order of `next_uid`; fewer at the end of the stream."""
        new = count(self._cursor) if self.total is None else range(self._cursor, self.total)
        return list(islice(chain(sorted(self._waiting), new), most))

    def dispatched(self, uid: int) -> None:
        """Count one issue of `uid`. New occurrences before it wait from now on.

        Raises:
            RunError: it neither waits nor is new, or it is beyond the end of the stream.
        """
        if uid in self._waiting:
            self._waiting.remove(uid)
            heapq.heapify(self._waiting)
        elif self._cursor <= uid and (self.total is None or uid < self.total):
            for passed in range(self._cursor, uid):
                heapq.heappush(self._waiting, passed)
            self._cursor = uid + 1
        else:
            raise RunError(f"occurrence {uid} cannot be dispatched: it is {self._state_of(uid)}")
        self._in_flight[uid] = "dispatched"
        self._issued += 1

    def queued(self, uid: int) -> None:
        """The group of a dispatched occurrence is on its way to the trainer.

        Raises:
            RunError: it was not dispatched.
        """
        self._require(uid, ("dispatched",), "queued")
        self._in_flight[uid] = "queued"
        self._outlasted.pop(uid, None)
        self._crashed.pop(uid, None)

    def trained(self, uids: Iterable[int]) -> None:
        """The parameters include these occurrences: all of them, or on error none.

        Raises:
            RunError: one was trained before, is named twice, or was never queued.
        """
        batch = list(uids)
        if len(set(batch)) != len(batch):
            raise RunError(f"the batch {batch} names an occurrence twice")
        for uid in batch:
            self._require(uid, ("queued",), "trained")
        for uid in batch:
            del self._in_flight[uid]
            self._attempts.pop(uid, None)
        self._trained += len(batch)

    def dropped(self, uid: int, reason: str) -> None:
        """The group was lost through no fault of the prompt: count the reason, issue it again.

        Raises:
            RunError: it is neither dispatched nor queued.
        """
        self._require(uid, ("dispatched", "queued"), f"dropped ({reason})")
        del self._in_flight[uid]
        self._dropped[reason] += 1
        heapq.heappush(self._waiting, uid)

    def failed(self, uid: int, reason: str, max_attempts: int) -> bool:
        """An attempt failed: issue it again, or quarantine it at the `max_attempts`-th failure.

        Returns:
            Whether the occurrence is quarantined.

        Raises:
            RunError: it is not in flight.
        """
        return self._drop_or_quarantine(self._attempts, uid, max_attempts, reason, reason)

    def outlasted(self, uid: int, max_attempts: int) -> bool:
        """A dispatched occurrence became too old during its generation.

        It is dropped as "stale" and issued again; the `max_attempts`-th time in a row it is quarantined as
        "never_fits".

        Returns:
            Whether the occurrence is quarantined.

        Raises:
            RunError: it is not in flight.
        """
        return self._drop_or_quarantine(self._outlasted, uid, max_attempts, "stale", "never_fits")

    def crashed(self, uid: int, max_crashes: int) -> bool:
        """The engine crashed while it generated a dispatched occurrence, which may be the cause.

        It is dropped as "engine_lost" and issued again; the `max_crashes`-th time in a row it is quarantined as
        "kills_engine".

        Returns:
            Whether the occurrence is quarantined.

        Raises:
            RunError: it is not in flight.
        """
        return self._drop_or_quarantine(self._crashed, uid, max_crashes, "engine_lost", "kills_engine")

    def _drop_or_quarantine(self, times: dict[int, int], uid: int, most: int, reason: str, verdict: str) -> bool:
        """Add one to `times`; drop the occurrence for `reason`, or the `most`-th time quarantine it as `verdict`."""
        count = times.get(uid, 0) + 1
        if count >= most:
            self.quarantine(uid, verdict)
            return True
        self.dropped(uid, reason)
        times[uid] = count
        return False

    def quarantine(self, uid: int, reason: str) -> None:
        """Never issue a dispatched or queued occurrence again.

        Raises:
            RunError: it is not in flight.
        """
        self._require(uid, ("dispatched", "queued"), f"quarantined ({reason})")
        del self._in_flight[uid]
        self._attempts.pop(uid, None)
        self._outlasted.pop(uid, None)
        self._crashed.pop(uid, None)
        self._quarantined[uid] = reason

    def failures(self, uid: int) -> int:
        """Failed attempts of an occurrence."""
        return self._attempts.get(uid, 0)

    def crashes(self, uid: int) -> int:
        """Engine crashes in a row during the generation of an occurrence."""
        return self._crashed.get(uid, 0)

    @property
    def quarantined(self) -> Mapping[int, str]:
        """Reason by quarantined uid."""
        return self._quarantined

    @property
    def trained_count(self) -> int:
        """Occurrences trained since the run began, over restarts."""
        return self._trained

    def counts(self) -> dict[str, int]:
        """`issued`, `trained`, `quarantined`, `dispatched`, `queued`, `waiting` and `dropped/REASON`."""
        queued = sum(stage == "queued" for stage in self._in_flight.values())
        return {
            "issued": self._issued,
            "trained": self._trained,
            "quarantined": len(self._quarantined),
            "dispatched": len(self._in_flight) - queued,
            "queued": queued,
            "waiting": len(self._waiting),
            **{f"dropped/{reason}": count for reason, count in sorted(self._dropped.items())},
        }

    def check(self) -> None:
        """Verify the balance of issues and of occurrences.

        Raises:
            RunError: they do not balance.
        """
        in_flight = len(self._in_flight)
        ended = self._trained + self._dropped.total() + len(self._quarantined)
        if self._issued != ended + in_flight:
            raise RunError(f"ledger out of balance: issued {self._issued}, ended {ended}, in flight {in_flight}")
        seen = self._trained + len(self._quarantined) + in_flight + len(self._waiting)
        if self._cursor != seen:
            raise RunError(f"ledger out of balance: cursor {self._cursor}, but {seen} occurrences are accounted for")

    def state(self) -> dict[str, Any]:
        """JSON value for `restore`; its size depends on the occurrences outstanding or quarantined, not on the run."""
        return {
            "cursor": self._cursor,
            "outstanding": sorted([*self._waiting, *self._in_flight]),
            "issued": self._issued,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "quarantined": {str(uid): reason for uid, reason in self._quarantined.items()},
            "attempts": {str(uid): count for uid, count in self._attempts.items()},
            "outlasted": {str(uid): count for uid, count in self._outlasted.items()},
            "crashed": {str(uid): count for uid, count in self._crashed.items()},
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], total: int | None) -> Ledger:
        """The ledger of a run that resumes.

        Occurrences that were issued and not trained at the snapshot are issued again first, in order. Those that were
        in flight count as dropped for "restart".

        Raises:
            CheckpointError: the state is damaged, or the stream is shorter than what was issued from it.
        """
        ledger = cls(total)
        try:
            ledger._cursor, ledger._issued, ledger._trained = state["cursor"], state["issued"], state["trained"]
            ledger._waiting = sorted(state["outstanding"])
            ledger._dropped = Counter(state["dropped"])
            ledger._quarantined = {int(uid): reason for uid, reason in state["quarantined"].items()}
            ledger._attempts = {int(uid): count for uid, count in state["attempts"].items()}
            ledger._outlasted = {int(uid): count for uid, count in state.get("outlasted", {}).items()}
            ledger._crashed = {int(uid): count for uid, count in state.get("crashed", {}).items()}
            lost = ledger._issued - ledger._trained - ledger._dropped.total() - len(ledger._quarantined)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the ledger in the checkpoint is damaged: {error!r}") from error
        if total is not None and ledger._cursor > total:
            raise CheckpointError(
                f"the checkpoint has issued {ledger._cursor} prompts and the data holds {total}. "
                "Resume with the data and the data.epochs of the run's beginning."
            )
        if lost:
            ledger._dropped["restart"] += lost
        try:
            ledger.check()
        except RunError as error:
            raise CheckpointError(f"the ledger in the checkpoint is damaged: {error}") from error
        return ledger

    def _require(self, uid: int, stages: tuple[Stage, ...], verb: str) -> None:
        if self._in_flight.get(uid) not in stages:
            raise RunError(f"occurrence {uid} cannot be {verb}: it is {self._state_of(uid)}")

    def _state_of(self, uid: int) -> str:
        if uid in self._in_flight:
            return self._in_flight[uid]
        if uid in self._quarantined:
            return f"quarantined ({self._quarantined[uid]})"
        if uid in self._waiting:
            return "waiting to be issued"
        return "trained already" if 0 <= uid < self._cursor else "not issued yet"
