"""Accounting of the rollout side: what happened to every prompt occurrence, why, and how many tokens it cost."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from tidemill.config.run import RunConfig
from tidemill.observe.metrics import part_means
from tidemill.records import Completion, Group
from tidemill.rollout.failures import CrashQuarantine
from tidemill.rollout.group_request import Clock, GroupRequest, RequestFailed, token_count
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.prompts import UnusablePromptError

LOG = logging.getLogger(__name__)


class IdleMeter:
    """Exact share of wall time without activity since the last reading."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active = 0
        self._finished = False
        self._since = self._read_from = clock()
        self._idle = 0.0

    @contextmanager
    def activity(self) -> Iterator[None]:
        """The body is one activity; several may overlap."""
        self._account()
        self._active += 1
        try:
            yield
        finally:
            self._account()
            self._active -= 1

    def finish(self) -> None:
        """No activity follows; time from here on counts as neither idle nor elapsed."""
        self._account()
        self._finished = True

    def read(self) -> float:
        """Idle share since the last reading, 0 if no time has passed; starts a new interval."""
        self._account()
        elapsed = self._since - self._read_from
        share = self._idle / elapsed if elapsed > 0 else 0.0
        self._idle, self._read_from = 0.0, self._since
        return share

    def _account(self) -> None:
        if self._finished:
            return
        now = self._clock()
        if self._active == 0:
            self._idle += now - self._since
        self._since = now


class RolloutMetrics:
    """Counts, and means over the groups that were finished, since the last report."""

    def __init__(self) -> None:
        self._groups: list[Mapping[str, float]] = []
        self._counts: Counter[str] = Counter()

    def add_group(self, group: Group, seconds: float) -> None:
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        rewards = group.rewards
        means: dict[str, float] = {
            "reward/mean": float(rewards.mean()),
            "reward/std_in_group": float(rewards.std()),
            "response_length/mean": float(np.mean(lengths)),
            "truncated": float(np.mean([rollout.finish_reason == "length" for rollout in group.rollouts])),
            "group_seconds/mean": seconds,
        }
        means |= {f"reward/{name}": mean for name, mean in part_means(group.rollouts).items()}
        self._groups.append(means)
        self._counts["generated_groups"] += 1
        self._counts["generated_tokens"] += sum(lengths)
        self._counts["updated_midway"] += group.oldest_version != group.newest_version

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def take(self) -> dict[str, float]:
        """Everything since the last report: counts as they are, the rest as means over groups; starts anew.

        A part of the reward that a group lacks counts as 0.
        """
        names = dict.fromkeys(name for means in self._groups for name in means)
        report = {name: float(np.mean([means.get(name, 0.0) for means in self._groups])) for name in names}
        report |= {name: float(self._counts[name]) for name in ("generated_groups", "generated_tokens", *self._counts)}
        self._groups, self._counts = [], Counter()
        return report


class Accounting:
    """Keeps the ledger, the metrics since the last step, and the number of tokens sampled in vain.

    Args:
        config: of the run.
        ledger: of the run.
        queued: `usable_version` by uid of every group that is in the queue or on its way into it; kept up to date.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, queued: dict[int, int]) -> None:
        self._config, self._ledger, self._queued = config, ledger, queued
        self.metrics, self.crashes = RolloutMetrics(), CrashQuarantine(ledger, config.rollout.max_attempts)
        self._sampled: dict[int, int] = {}  # tokens of every group that is generated and not trained yet, by uid

    def unusable(self, uid: int, error: UnusablePromptError) -> None:
        """Skip a prompt that no engine can get."""
        self._ledger.quarantine(uid, error.reason)
        self.metrics.count(f"skipped/{error.reason}")
        LOG.warning("prompt occurrence %d skipped: %s", uid, error)

    def generated(self, uid: int, completions: Sequence[Completion]) -> None:
        self.crashes.generated()
        self._sampled[uid] = token_count(completions)

    def queued(self, uid: int, usable_version: int) -> None:
        self._ledger.queued(uid)
        self._queued[uid] = usable_version

    def trained(self, uids: Sequence[int]) -> None:
        self._ledger.trained(uids)
        for uid in uids:
            self._queued.pop(uid, None)
            self._sampled.pop(uid, None)

    def dropped(self, uids: Sequence[int], reason: str) -> None:
        for uid in uids:
            self._ledger.dropped(uid, reason)
            self._queued.pop(uid, None)
            self.metrics.count(f"dropped/{reason}")
            self.wasted(self._sampled.pop(uid, 0))

    def failed(self, uid: int, failure: RequestFailed) -> None:
        """An attempt failed: the prompt is issued again, or quarantined after `rollout.max_attempts`."""
        self.wasted(self._sampled.pop(uid, 0))
        limit = self._config.rollout.max_attempts
        quarantined = self._ledger.failed(uid, failure.reason, limit)
        self.metrics.count(f"failed/{failure.reason}")
        outcome = f"quarantined after {limit} attempts" if quarantined else "issued again"
        LOG.warning("prompt occurrence %d: %s, %s: %r", uid, failure.reason, outcome, failure.__cause__)

    def crashed(self, request: GroupRequest) -> None:
        """The engine crashed during the request: the prompt is issued again, or quarantined after several crashes."""
        if request.engine is not None and self.crashes.crashed(request.uid, request.engine):
            self.metrics.count("skipped/kills_engine")
            LOG.warning(
                "prompt occurrence %d skipped: %d engines in a row crashed while they generated it; the last one, %s, "
                "had no other request",
                *(request.uid, self.crashes.max_crashes, request.engine),
            )
        else:
            self.metrics.count("dropped/engine_lost")

    def outlasted(self, uid: int) -> None:
        """A group became too old during generation. After `max_attempts` times in a row its prompt is quarantined."""
        limit = self._config.rollout.max_attempts
        self.metrics.count("cancelled/stale")
        if self._ledger.outlasted(uid, limit):
            self.metrics.count("skipped/never_fits")
            LOG.warning(
                "prompt occurrence %d skipped: %d times in a row its generation outlasted asynchrony.max_staleness = "
                "%d versions; raise it, or asynchrony.trigger_parameter_sync_step",
                *(uid, limit, self._config.asynchrony.max_staleness),
            )
        else:
            self.metrics.count("dropped/stale")

    def cancelled(self, uid: int, reason: str) -> None:
        self.metrics.count(f"cancelled/{reason}")
        self.dropped([uid], reason)

    def wasted(self, tokens: int) -> None:
        if tokens:
            self.metrics.count("wasted_tokens", tokens)

    def take(self) -> Mapping[str, float]:
        """The metrics, and the ledger's counts as `ledger/NAME`; the metrics start anew."""
        return self.metrics.take() | {f"ledger/{name}": float(n) for name, n in self._ledger.counts().items()}
