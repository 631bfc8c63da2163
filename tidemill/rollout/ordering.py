"""The order in which prompts start and in which finished groups go to the trainer. No I/O.

Start order: a prompt that is known to take long starts early in a version. A group that starts in version v can be
trained if it is finished when the trainer takes the last batch of version v + eta (eta is `max_staleness`). With
versions that last T seconds, that leaves

    (eta + 1) * T - r - (time since v began)

where r is the time from the last batch of a version to the version's end. The rollouter cannot see r. It is about
T / (steps of a version) if the trainer never waits, and at most the time since the last group of that batch was
finished.

A run reads its data many times, and a prompt's responses are about as long as in the pass before (He et al. 2025,
arXiv:2508.18588, section 3). So a prompt that took long the last time and would start late in a version is deferred to
the beginning of the next one, and the prompt behind it goes first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from tidemill.config.run import RunConfig
from tidemill.rollout.group_request import GroupRequest
from tidemill.rollout.staleness import StalenessPolicy

# Response lengths vary, and may grow in training. A group that takes longer than expected is generated in vain; but if
# too many are deferred, the next version begins with more long prompts than can start early.
MARGIN = 2.0


class StartOrder:
    """Chooses the prompt that starts next.

    A prompt is deferred once: in the next version it starts in its place in the data, however long it may take. So
    does a prompt that was never finished. In a synchronous run no group can become too old, and nothing is deferred.
    """

    def __init__(self, row: Callable[[int], int], rows: int, config: RunConfig) -> None:
        self._row, self._steps = row, config.asynchrony.trigger_parameter_sync_step
        self._eta = 0 if config.synchronous else config.asynchrony.max_staleness
        self._seconds = np.zeros(rows, dtype=np.float32)  # duration of each row's last group; 0: unknown
        self._longest = 0.0
        self._deferred: set[int] = set()
        self._due: set[int] = set()
        self._finished: dict[int, float] = {}  # time by occurrence, until it is trained
        self._batch_finished = -math.inf
        self._began: float | None = None
        self._usable_s = math.inf  # of a version and the eta after it

    def __len__(self) -> int:
        return len(self._deferred) + len(self._due)

    def finished(self, uid: int, started: float, now: float) -> None:
        self._seconds[self._row(uid)] = now - started
        self._longest = max(self._longest, now - started)
        self._finished[uid] = now

    def trained(self, uids: Iterable[int]) -> None:
        """These were a batch, perhaps the last one of a version."""
        self._batch_finished = max((self._finished.pop(uid) for uid in uids), default=-math.inf)

    def begin_version(self, now: float) -> None:
        """A version begins, in which every deferred prompt is due."""
        if self._began is not None and self._eta:
            version_s = now - self._began
            self._usable_s = (self._eta + 1) * version_s - min(version_s / self._steps, now - self._batch_finished)
        self._began = now
        self._due |= self._deferred
        self._deferred.clear()

    def choose(self, uids: Sequence[int], now: float) -> int | None:
        """The first of `uids` that is due or ends in time, else the first of all; None if `uids` is empty."""
        if not uids:
            return None
        left_s = self._left_s(now)
        in_time = (n for n, uid in enumerate(uids) if uid in self._due or self._expected_s(uid) <= left_s)
        return uids[next(in_time, 0)]

    def start(self, uid: int, passed: Iterable[int]) -> None:
        """Start an occurrence, and defer those that it passed over."""
        self._deferred.update(passed)
        self._deferred.discard(uid)
        self._due.discard(uid)

    def _left_s(self, now: float) -> float:
        """Time in which a group that starts now must be finished; unlimited until a version has been measured."""
        return math.inf if self._began is None else self._began + self._usable_s - now

    def _expected_s(self, uid: int) -> float:
        """Time to allow for; at most the longest seen so far, because `rollout.max_new_tokens` ends every response."""
        return min(MARGIN * float(self._seconds[self._row(uid)]), self._longest)


class DeliveryOrder:
    """Lets finished groups into the queue one by one, in an order in which none becomes too old (strategy `wait`).

    With another strategy than `wait`, groups go in the order in which they finish.
    """

    def __init__(self, policy: StalenessPolicy) -> None:
        self._policy = policy
        self._waiting: dict[int, tuple[GroupRequest, asyncio.Event]] = {}
        self._delivering: GroupRequest | None = None
        self._unordered = policy.strategy != "wait"

    @asynccontextmanager
    async def delivery(self, request: GroupRequest) -> AsyncIterator[None]:
        """Wait until `release_next` chooses the request; the body then delivers it, alone."""
        event = asyncio.Event()
        try:
            if not self._unordered:
                self._waiting[request.number] = request, event
                await event.wait()
            yield
        finally:
            self._waiting.pop(request.number, None)
            if self._delivering is request:
                self._delivering = None

    def release_next(self, accepted: int, in_flight: Mapping[int, GroupRequest]) -> None:
        """Unless a delivery is under way, begin the oldest one that keeps all other groups in time.

        Args:
            accepted: groups queued or trained since the start of the run, without those in `in_flight`.
            in_flight: all requests, waiting ones included.
        """
        for number, (request, event) in sorted(self._waiting.items()):
            if self._delivering is not None:
                return
            others = (other.version for other in in_flight.values() if other is not request)
            if self._policy.keeps_all_in_time(accepted + 1, others):
                self._delivering = request
                del self._waiting[number]
                event.set()

    def release_all(self) -> None:
        """Let every group go, now and later, because the run ends."""
        self._unordered = True
        for _, event in self._waiting.values():
            event.set()
