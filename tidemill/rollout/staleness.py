"""Staleness: how many groups may start now, and which are too old to train. Pure arithmetic.

Notation: B groups are trained per version, eta is `max_staleness`, v the present version. Groups are trained in
about the order in which they start, so the i-th group of the run (from 0) is trained at version floor(i / B). A group
that starts at v is at most eta versions old when it is trained if

    i < (eta + v + 1) * B,

which is the capacity formula of AReaL (Fu et al. 2025, arXiv:2505.24298, section 5.1). Admission applies the formula
to the number of groups; `too_old` is the hard bound for a single group that others have overtaken. The strategy decides
how the bound is kept:

pace: groups are trained in the order in which they finish; a group that becomes too old is cancelled.
drop: admission ignores ages; a group that becomes too old is cancelled or swept from the queue, and generated again.
wait: groups are delivered in an order in which none can become too old, and the trainer waits for the slow ones. Let g
    be the next group to deliver, the d-th of the run, and s_0 <= s_1 <= ... the versions at which the other groups in
    flight have started. If they follow in this order, the k-th is trained at version floor((d + k) / B), so
    g may go when d + k < (s_k + eta + 1) * B for all k. The oldest group may always go (earliest deadline first).
mask: like pace, but a group that was overtaken goes on. Its tokens that are not too old are trained; the others are
    context without a loss. Only a group whose tokens are all too old is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidemill.config.run import RunConfig

Strategy = Literal["pace", "drop", "wait", "mask"]


def too_old(sampled: int, version: int, max_staleness: int) -> bool:
    """Whether a token sampled at version `sampled` is too old to be trained at `version`."""
    return version - sampled > max_staleness


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Admission of groups.

    Attributes:
        max_staleness: hard bound on the age of a trained token, in versions.
        groups_per_version: groups trained between two weight syncs (B).
        max_concurrent: groups that all engines run at once.
        max_groups_between_syncs: verl's bound, or None: the groups started since the last sync, plus those running
            or queued at that sync, are at most this many. `(1 + threshold) * B` in a config.
        total: groups that the whole run trains, or None.
        strategy: how the bound is kept, see above.
    """

    max_staleness: int
    groups_per_version: int
    max_concurrent: int
    max_groups_between_syncs: int | None = None
    total: int | None = None
    strategy: Strategy = "pace"

    @classmethod
    def of(cls, config: RunConfig, engines: int) -> StalenessPolicy:
        """The policy that a config describes for this many engines."""
        return cls(
            max_staleness=config.asynchrony.max_staleness,
            groups_per_version=config.groups_per_version,
            max_concurrent=config.rollout.concurrent_samples_per_replica * engines,
            max_groups_between_syncs=config.max_groups_between_syncs,
            total=config.trainer.steps * config.required_samples,
            strategy=config.asynchrony.staleness_strategy,
        )

    def capacity(self, version: int, running: int, accepted: int) -> int:
        """How many groups may start now; never negative.

        At the sync to `version` exactly `version * B` groups had been trained, so verl's count since that sync is
        `accepted + running - version * B`. A dropped group leaves `running` or `accepted`, so another one may start.

        Args:
            version: the version that engines sample from.
            running: groups in flight: started and not queued.
            accepted: groups queued or trained since the very start of the run; `version * B` just after a resume at
                `version`, when the queue is empty.
        """
        bounds = [self.max_concurrent - running]
        if self.strategy != "drop":
            bounds.append(self.deadline(version) - (accepted + running))
        if self.max_groups_between_syncs is not None:
            since_sync = accepted + running - version * self.groups_per_version
            bounds.append(self.max_groups_between_syncs - since_sync)
        if self.total is not None:
            bounds.append(self.total - (accepted + running))
        return max(0, min(bounds))

    def deadline(self, version: int) -> int:
        """Number of groups that can be trained before a group that starts at `version` is too old."""
        return (self.max_staleness + version + 1) * self.groups_per_version

    def usable_version(self, oldest: int, newest: int) -> int:
        """The version by which a group becomes too old, from the oldest and the newest version of its tokens."""
        return newest if self.strategy == "mask" else oldest

    def keeps_all_in_time(self, delivered: int, others: Iterable[int]) -> bool:
        """Whether every other group can still be trained in time if one more is delivered now.

        Args:
            delivered: groups queued or trained since the start of the run, including that one.
            others: the versions at which the groups in flight started, without that one, in any order.
        """
        return all(delivered + place < self.deadline(version) for place, version in enumerate(sorted(others)))
