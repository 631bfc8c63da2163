"""What the rollout side reports since the last report: idle time, requests in flight, the tally of finished groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from tidemill.observe.metrics import part_means
from tidemill.records import Group

Clock = Callable[[], float]
RESOLUTION_S = 0.02  # changes that lie closer together become one, so that a large run stays readable


class IdleMeter:
    """Exact share of wall time without activity, summed over every interval since the last reading.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active = 0
        self._finished = False
        self._since = self._read_from = clock()
        self._idle = 0.0

    @property
    def active(self) -> int:
        """Activities under way."""
        return self._active

    def enter(self) -> None:
        """One more activity."""
        self._account()
        self._active += 1

    def leave(self) -> None:
        """One activity less."""
        self._account()
        self._active -= 1

    def finish(self) -> None:
        """Nothing will follow; time from here on counts as neither idle nor elapsed."""
        self._account()
        self._finished = True

    def read(self) -> float:
        """Idle share since the last reading, 0 for no elapsed time; starts anew."""
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


class LoadMeter:
    """How many requests each engine has in flight, over time.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._changes: dict[str, list[tuple[float, int]]] = {}

    def note(self, engine: str, requests: int) -> None:
        """From now on so many."""
        changes, now = self._changes.setdefault(engine, []), self._clock()
        if changes and now - changes[-1][0] < RESOLUTION_S:
            changes[-1] = (changes[-1][0], requests)
        else:
            changes.append((now, requests))

    def take(self) -> dict[str, list[tuple[float, int]]]:
        """Since the last report, by engine: from when on it has how many in flight; starts anew."""
        changes, self._changes = self._changes, {}
        return changes


class Tally:
    """Counts and means of the groups that were finished since the last report."""

    def __init__(self) -> None:
        self._groups: list[Mapping[str, float]] = []
        self._counts: Counter[str] = Counter()

    def group(self, group: Group, seconds: float) -> None:
        """A group was finished."""
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
        """Something to be counted happened, once or so often."""
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
