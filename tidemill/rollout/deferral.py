"""Deferral: what is known to take long starts early in a version, where it fits. Pure bookkeeping, no IO.

A group that starts in version v can be trained if it is finished when the trainer takes the last batch of version
v + eta (eta is `max_staleness`). With versions that last T seconds, that leaves

    (eta + 1) * T - r - (time since v began)

where r is how long before the end of a version its last batch is taken. It is not seen, but it is about
T / (steps of a version) where the trainer waits for nothing, and no longer than the time since the last group of that
batch was finished.

Data is read many times, and a prompt's responses are about as long as in the pass before (He et al. 2025,
arXiv:2508.18588, section 3). So a prompt that took long the last time and would start late in a version is put off to
the beginning of the next one, and the prompt behind it goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tidemill.config.run import RunConfig

# Responses vary, and may grow in training. A group that turns out too long is generated in vain; but where too much is
# put off, the next version begins with more than can start early.
MARGIN = 2.0


class Deferral:
    """Chooses the prompt that starts next.

    A prompt is put off once: in the next version it starts in its turn, however long it may take. One that was never
    finished starts in its turn, too. In a synchronous run no group can be overtaken, and nothing is put off.

    Args:
        row: the row of the data that an occurrence is of.
        rows: of the data.
        config: the staleness bounds, and the steps of a version.
    """

    def __init__(self, row: Callable[[int], int], rows: int, config: RunConfig) -> None:
        self._row, self._steps = row, config.asynchrony.trigger_parameter_sync_step
        self._eta = 0 if config.synchronous else config.asynchrony.max_staleness
        self._seconds = np.zeros(rows, dtype=np.float32)  # that each took the last time; 0: not known
        self._longest = 0.0
        self._put_off: set[int] = set()
        self._due: set[int] = set()
        self._finished: dict[int, float] = {}  # when, by occurrence, until it is trained
        self._batch_finished = -math.inf
        self._began: float | None = None
        self._usable_s = math.inf  # of a version and the eta after it

    def __len__(self) -> int:
        """Prompts that are put off and have not started yet."""
        return len(self._put_off) + len(self._due)

    def finished(self, uid: int, started: float, now: float) -> None:
        """The group of this occurrence is generated and scored."""
        self._seconds[self._row(uid)] = now - started
        self._longest = max(self._longest, now - started)
        self._finished[uid] = now

    def trained(self, uids: Iterable[int]) -> None:
        """These were a batch; a version may begin now."""
        self._batch_finished = max((self._finished.pop(uid) for uid in uids), default=-math.inf)

    def begin_version(self, now: float) -> None:
        """A version begins, in which everything that was put off is due."""
        if self._began is not None and self._eta:
            version_s = now - self._began
            self._usable_s = (self._eta + 1) * version_s - min(version_s / self._steps, now - self._batch_finished)
        self._began = now
        self._due |= self._put_off
        self._put_off.clear()

    def choose(self, uids: Sequence[int], now: float) -> int | None:
        """The first of these occurrences that is due or ends in time, else the first of all; None if there are none."""
        if not uids:
            return None
        left_s = self._left_s(now)
        in_time = (n for n, uid in enumerate(uids) if uid in self._due or self._expected_s(uid) <= left_s)
        return uids[next(in_time, 0)]

    def start(self, uid: int, passed: Iterable[int]) -> None:
        """An occurrence starts before those that it passed over, which are put off."""
        self._put_off.update(passed)
        self._put_off.discard(uid)
        self._due.discard(uid)

    def _left_s(self, now: float) -> float:
        """Time in which a group that starts now must be finished; unlimited until a version has been measured."""
        return math.inf if self._began is None else self._began + self._usable_s - now

    def _expected_s(self, uid: int) -> float:
        """Time to allow for. Nothing takes longer than the longest so far: the response budget ends it."""
        return min(MARGIN * float(self._seconds[self._row(uid)]), self._longest)
