"""Admission: the staleness policy over the books of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile

from tidemill.config.run import RunConfig
from tidemill.errors import RunError
from tidemill.rollout.deferral import Deferral
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.staleness import StalenessPolicy, too_old


class Admission:
    """Which group may start, and whether any more are wanted.

    Args:
        config: the bounds.
        engines: how many there are.
        ledger: of the run.
        version: the version that the engines sample from at the start.
        deferral: chooses among the prompts of one version.

    Attributes:
        policy: of the config.
        version: that the engines sample from.
        queued: `usable_version` of every group in the queue or on its way into it, by uid.
    """

    def __init__(self, config: RunConfig, engines: int, ledger: Ledger, version: int, deferral: Deferral) -> None:
        self._deferral, self._ledger = deferral, ledger
        self._step, self._per_version = config.required_samples, config.groups_per_version
        self._wanted = config.trainer.steps * config.required_samples
        # A version that ended early, with the data or the steps, counts like a whole one.
        self._uncounted = version * config.groups_per_version - ledger.trained_count
        self.policy = replace(StalenessPolicy.of(config, engines), total=self._wanted + self._uncounted)
        self._per_engine = config.rollout.concurrent_samples_per_replica
        self.version = version
        self.queued: dict[int, int] = {}

    def resize(self, engines: int) -> None:
        """So many engines are there now; with none, nothing starts."""
        self.policy = replace(self.policy, max_concurrent=self._per_engine * engines)

    def begin_version(self, version: int, now: float) -> None:
        """The engines sample from this version now.

        Raises:
            RunError: it goes backwards.
        """
        if version < self.version:
            raise RunError(f"policy version {version} begins after version {self.version}")
        if version > self.version:
            self._deferral.begin_version(now)
        self.version = version

    def next(self, under_way: Collection[int], now: float) -> int | None:
        """The occurrence that may start beside the given ones; None if there is no room, or nothing left to start.

        It passes over fewer than the groups of a version, and over none for which the run would have no place left: the
        run trains the occurrences that it would train in order. So what the queue will sweep for its age, and is to be
        generated again, keeps its place here, unlike in `settled`.
        """
        if self.capacity(under_way) == 0:
            return None
        places = max(0, self._wanted - self._ledger.trained_count - len(self.queued.keys() | set(under_way)))
        return self._deferral.choose(self._ledger.upcoming(min(self._per_version, places)), now)

    def start(self, uid: int) -> None:
        """What `next` returned starts."""
        passed = takewhile(lambda other: other != uid, self._ledger.upcoming(self._per_version))
        self._deferral.start(uid, passed)
        self._ledger.dispatched(uid)

    def capacity(self, under_way: Collection[int]) -> int:
        """Groups that may start beside those of the given uids."""
        return self.policy.capacity(self.version, len(under_way), self.settled(under_way))

    def settled(self, under_way: Collection[int]) -> int:
        """Groups queued or trained. What the queue will sweep for its age has given its place back already."""
        waiting = (version for uid, version in self.queued.items() if uid not in under_way)
        return self._trained() + sum(not self.too_old(version) for version in waiting)

    def too_old(self, version: int) -> bool:
        """Whether what was sampled at this version may no longer be trained."""
        return too_old(version, self.version, self.policy.max_staleness)

    def overtaken(self, started: int, newest: int) -> bool:
        """Whether a group that is being generated is to be cancelled.

        Args:
            started: its version.
            newest: the version that its engine samples from.
        """
        return self.too_old(self.policy.usable_version(started, newest))

    def complete(self) -> bool:
        """The steps of the run are trained."""
        return self._ledger.trained_count >= self._wanted

    def exhausted(self, under_way: Collection[int]) -> bool:
        """The prompts are used up, and all that is left fills no batch.

        What is in the queue may yet be swept as stale and have to be generated again, so the end waits for the trainer;
        a rest that it can take at its present version is released by closing the queue.
        """
        used_up = not under_way and self._ledger.next_uid() is None
        caught_up = self._trained() // self._per_version <= self.version
        fresh = not any(self.too_old(version) for version in self.queued.values())
        return used_up and caught_up and fresh and len(self.queued) < self._step

    def _trained(self) -> int:
        return self._uncounted + self._ledger.trained_count
