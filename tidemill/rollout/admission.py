"""Admission: applies the staleness policy to the current state of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile

from tidemill.config.run import RunConfig
from tidemill.errors import RunError
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.ordering import StartOrder
from tidemill.rollout.staleness import StalenessPolicy, too_old


class Admission:
    """Decides which group may start, and whether the run needs more.

    Attributes:
        policy: of the config, for the present number of engines.
        version: the version that the engines sample from.
        queued: `usable_version` of every group in the queue or on its way into it, by uid.
    """

    def __init__(self, config: RunConfig, engines: int, ledger: Ledger, version: int, start_order: StartOrder) -> None:
        self._start_order, self._ledger = start_order, ledger
        self._step, self._per_version = config.required_samples, config.groups_per_version
        self._wanted = config.trainer.steps * config.required_samples
        # A version that ended early, with the data or the steps, counts like a whole one.
        self._uncounted = version * config.groups_per_version - ledger.trained_count
        self.policy = replace(StalenessPolicy.of(config, engines), total=self._wanted + self._uncounted)
        self._per_engine = config.rollout.concurrent_samples_per_replica
        self.version = version
        self.queued: dict[int, int] = {}

    def resize(self, engines: int) -> None:
        """Set the number of engines; with none, nothing starts."""
        self.policy = replace(self.policy, max_concurrent=self._per_engine * engines)

    def begin_version(self, version: int, now: float) -> None:
        """The engines sample from this version from now on."""
        if version < self.version:
            raise RunError(f"policy version {version} begins after version {self.version}")
        if version > self.version:
            self._start_order.begin_version(now)
        self.version = version

    def next(self, in_flight: Collection[int], now: float) -> int | None:
        """The occurrence that may start beside those in flight; None without capacity or prompts.

        It passes over fewer than the groups of a version, and over no occurrence that could then not be trained in
        this run: the run trains the same occurrences as in order. So a group that the queue will sweep as stale, and
        that will be generated again, keeps its place here, unlike in `accepted`.
        """
        if self.capacity(in_flight) == 0:
            return None
        places = max(0, self._wanted - self._ledger.trained_count - len(self.queued.keys() | set(in_flight)))
        return self._start_order.choose(self._ledger.upcoming(min(self._per_version, places)), now)

    def start(self, uid: int) -> None:
        passed = takewhile(lambda other: other != uid, self._ledger.upcoming(self._per_version))
        self._start_order.start(uid, passed)
        self._ledger.dispatched(uid)

    def capacity(self, in_flight: Collection[int]) -> int:
        return self.policy.capacity(self.version, len(in_flight), self.accepted(in_flight))

    def accepted(self, in_flight: Collection[int]) -> int:
        """Groups queued or trained, without those that the queue will sweep as stale."""
        waiting = (version for uid, version in self.queued.items() if uid not in in_flight)
        return self._trained() + sum(not self.too_old(version) for version in waiting)

    def too_old(self, version: int) -> bool:
        return too_old(version, self.version, self.policy.max_staleness)

    def must_cancel(self, started: int, newest: int) -> bool:
        """`newest` is the version that its engine samples from."""
        return self.too_old(self.policy.usable_version(started, newest))

    def complete(self) -> bool:
        return self._ledger.trained_count >= self._wanted

    def exhausted(self, in_flight: Collection[int]) -> bool:
        """Whether the prompts are used up and the remaining groups fill no batch.

        A queued group may still be swept as stale and have to be generated again, so the end waits for the trainer.
        Closing the queue releases the remaining groups that the trainer can take at its present version.
        """
        used_up = not in_flight and self._ledger.next_uid() is None
        caught_up = self._trained() // self._per_version <= self.version
        fresh = not any(self.too_old(version) for version in self.queued.values())
        return used_up and caught_up and fresh and len(self.queued) < self._step

    def _trained(self) -> int:
        return self._uncounted + self._ledger.trained_count
