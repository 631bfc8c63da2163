"""Admission, ledger and queue together, over any interleaving of work, failures, version bumps and crashes.

The rules drive the real policy, ledger and queue the way the rollouter and the trainer do, one step at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_rig import run_config

from tidemill.errors import RunError
from tidemill.protocols import Delivery, Lease
from tidemill.queue.message_queue import MessageQueue
from tidemill.records import GroupHeader
from tidemill.rollout.admission import Admission
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.ordering import StartOrder

T = TypeVar("T")
NOW = 0.0  # a call that would wait times out at once


def at_once(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


class Run(RuleBasedStateMachine):
    """A run of `total` groups, B a version."""

    @initialize(
        eta=st.integers(0, 3),
        per_step=st.integers(1, 3),
        trigger=st.integers(1, 3),
        concurrent=st.integers(2, 9),
        strategy=st.sampled_from(["pace", "drop", "wait", "mask"]),
        threshold=st.sampled_from([None, 0.0, 0.5]),
        versions=st.integers(1, 6),
        rows=st.integers(1, 9),
        endless=st.booleans(),
    )
    def begin(
        self,
        *,
        eta: int,
        per_step: int,
        trigger: int,
        concurrent: int,
        strategy: Any,
        threshold: Any,
        versions: int,
        rows: int,
        endless: bool,
    ) -> None:
        groups = per_step * trigger
        if eta == 0 or (threshold is not None and int((1 + threshold) * groups) == groups):  # others are refused
            threshold, strategy = None if eta == 0 else threshold, "wait" if strategy == "wait" else "pace"
        bounds = {"max_staleness": eta, "staleness_threshold": threshold, "staleness_strategy": strategy}
        self.config = run_config(
            asynchrony=bounds | {"trigger_parameter_sync_step": trigger},
            rollout={"concurrent_samples_per_replica": concurrent},
            trainer={"steps": versions * trigger, "ppo_mini_batch_size": per_step},
        )
        self.eta, self.step, self.batch, self.total = eta, per_step, per_step * trigger, versions * per_step * trigger
        self.rows, self.stream, self.now = rows, None if endless else self.total, 0.0
        self.committed: tuple[str, int, list[int]] = (json.dumps(Ledger(self.stream).state()), 0, [])
        self.restart()

    def restart(self) -> None:
        """What a new process has: the last commit, an empty queue, nothing in flight."""
        state, version, trained = self.committed
        self.ledger, self.trained = Ledger.restore(json.loads(state), self.stream), list(trained)
        self.start_order = StartOrder(lambda uid: uid % self.rows, self.rows, self.config)
        self.admission = Admission(self.config, 1, self.ledger, version, self.start_order)
        self.policy, self.queued = self.admission.policy, self.admission.queued
        self.queue: MessageQueue[None] = MessageQueue(self.config.queue_capacity, self.eta)
        self.in_flight: dict[int, int] = {}  # version at the start by uid
        self.since_sync = 0

    @property
    def version(self) -> int:
        return self.admission.version

    @rule()
    def admit(self) -> None:
        while (uid := self.admission.next(self.in_flight, self.now)) is not None:
            self.admission.start(uid)
            self.in_flight[uid] = self.version

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.in_flight)))
        started = self.in_flight[uid]
        others = [version for other, version in self.in_flight.items() if other != uid]
        place = self.admission.accepted(self.in_flight) + 1
        if self.policy.strategy == "wait" and not self.policy.keeps_all_in_time(place, others):
            return
        oldest = data.draw(st.integers(started, self.version))  # it may get its first token in a later version
        usable = self.policy.usable_version(oldest, data.draw(st.integers(oldest, self.version)))
        self.now += data.draw(st.sampled_from([0.0, 1.0]))
        self.start_order.finished(uid, self.now - data.draw(st.sampled_from([1.0, 9.0])), self.now)
        try:
            at_once(self.queue.put([Delivery(GroupHeader(uid, oldest, usable, 1, 1), None)], NOW))
        except TimeoutError:
            assert len(self.queue.queued) == self.queue.capacity
            return
        self.ledger.queued(uid)
        del self.in_flight[uid]
        self.queued[uid] = usable

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), reason=st.sampled_from(["timeout", "engine_error"]))
    def fail(self, data: st.DataObject, reason: str) -> None:
        uid = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.ledger.dropped(uid, reason)
        del self.in_flight[uid]

    @rule()
    def train(self) -> None:
        """One optimizer step, and the next version after `trigger` of them."""
        try:
            lease: Lease[None] = at_once(self.queue.lease(self.step, self.version, NOW))
        except TimeoutError:
            return
        for uid in lease.swept:
            assert self.policy.strategy != "wait"
            self.ledger.dropped(uid, "stale")
            del self.queued[uid]
        if not lease.deliveries:
            return
        uids = [delivery.header.uid for delivery in lease.deliveries]
        assert all(self.version - delivery.header.usable_version <= self.eta for delivery in lease.deliveries)
        if self.policy.strategy != "mask":
            assert all(self.version - delivery.header.oldest_version <= self.eta for delivery in lease.deliveries)
        at_once(self.queue.acknowledge(lease.lease_id))
        self.ledger.trained(uids)
        self.start_order.trained(uids)
        for uid in uids:
            del self.queued[uid]
        self.trained += uids
        self.since_sync += self.step
        if self.since_sync == self.batch:
            self.next_version()

    @rule(data=st.data(), rounds=st.integers(1, 5))
    def work(self, data: st.DataObject, rounds: int) -> None:
        """The usual course of a run; without it few examples train many versions."""
        for _ in range(rounds):
            self.admit()
            for _ in range(min(self.step, len(self.in_flight))):
                self.finish(data)
            self.train()

    def next_version(self) -> None:
        """As `Rollouter.begin_version`."""
        self.admission.begin_version(self.version + 1, self.now)
        self.since_sync = 0
        for uid, started in list(self.in_flight.items()):
            if self.admission.must_cancel(started, self.version):
                assert self.policy.strategy not in ("wait", "mask")
                self.ledger.dropped(uid, "stale")
                del self.in_flight[uid]

    @rule()
    def commit(self) -> None:
        """Also in the middle of a version, as when a run is stopped; the resumed run begins a whole one."""
        self.committed = (json.dumps(self.ledger.state()), self.version, list(self.trained))

    @rule(dice=st.integers(0, 9))
    def crash(self, dice: int) -> None:
        """Rarely, so that runs make progress."""
        if dice == 9:
            self.restart()

    @rule(data=st.data())
    def train_twice(self, data: st.DataObject) -> None:
        if self.trained:
            with pytest.raises(RunError):
                self.ledger.trained([data.draw(st.sampled_from(self.trained))])

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        self.ledger.check()
        assert max(Counter(self.trained).values(), default=1) == 1
        assert self.ledger.trained_count == len(self.trained)
        counts = self.ledger.counts()
        assert (counts["dispatched"], counts["queued"]) == (len(self.in_flight), len(self.queued))
        assert len(self.in_flight) <= self.policy.max_concurrent

    @invariant()
    def no_more_is_under_way_than_can_be_trained_in_time(self) -> None:
        under_way = self.admission.accepted(self.in_flight) + len(self.in_flight)
        assert under_way <= self.total
        if self.policy.strategy != "drop":
            assert under_way <= self.policy.deadline(self.version)
        if self.policy.max_groups_between_syncs is not None:
            assert under_way - self.version * self.batch <= self.policy.max_groups_between_syncs

    def teardown(self) -> None:
        """From any state, the run comes to its end: every occurrence is trained exactly once."""
        for _ in range(20 * self.total + 20):
            self.admit()
            for uid in sorted(self.in_flight, key=lambda uid: self.in_flight[uid]):
                if len(self.queue.queued) < self.queue.capacity:
                    oldest = self.in_flight.pop(uid)
                    usable = self.policy.usable_version(oldest, self.version)
                    at_once(self.queue.put([Delivery(GroupHeader(uid, oldest, usable, 1, 1), None)], NOW))
                    self.ledger.queued(uid)
                    self.queued[uid] = usable
                    self.start_order.finished(uid, self.now - 1.0, self.now)
            self.train()
            if self.admission.complete():
                break
        assert sorted(self.trained) == list(range(self.total))


Run.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
test_any_interleaving = Run.TestCase


def test_a_group_that_will_be_swept_keeps_its_place_among_the_last_of_a_run() -> None:
    config = run_config(trainer={"steps": 3, "ppo_mini_batch_size": 1}, data={"epochs": None})
    ledger = Ledger(None)
    admission = Admission(config, 1, ledger, 0, StartOrder(lambda uid: 0, 1, config))
    for uid in range(2):
        assert admission.next({}, 0.0) == uid
        admission.start(uid)
        ledger.queued(uid)
        admission.queued[uid] = 0
    ledger.dispatched(2)
    ledger.queued(2)
    admission.queued[2] = 0
    for uid in range(2):
        ledger.trained([uid])
        del admission.queued[uid]
        admission.begin_version(uid + 1, float(uid))
    assert admission.too_old(0)
    assert admission.capacity({}) > 0
    assert admission.next({}, 3.0) is None  # not the occurrence after it
    ledger.dropped(2, "stale")
    del admission.queued[2]
    assert admission.next({}, 3.0) == 2
