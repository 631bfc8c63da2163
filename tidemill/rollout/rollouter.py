"""The Rollouter: keeps the engines busy within the staleness bound, and accounts for every prompt.

Each group is one asyncio task: generate on the least loaded engine, score, put into the queue. `run` starts tasks
whenever the staleness policy admits more, and watches them. Everything runs on one event loop in one thread; nothing
here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import EngineCrashedError
from tidemill.protocols import Delivery, Engine, Evaluation, Loads, Queue
from tidemill.records import EngineId, Group
from tidemill.rollout.accounting import Accounting, IdleMeter
from tidemill.rollout.admission import Admission
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.evaluator import Evaluator
from tidemill.rollout.failures import FailureStreak, Watchdog
from tidemill.rollout.group_request import (
    TIMEOUTS,
    Clock,
    Decode,
    GroupGenerator,
    GroupRequest,
    RequestFailed,
    Scorer,
    Timeouts,
)
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.ordering import DeliveryOrder, StartOrder
from tidemill.rollout.prompts import PromptSet, UnusablePromptError

LOG = logging.getLogger(__name__)

TICK_S = 1.0  # between two checks of a run in which nothing happens


class Rollouter:
    """The rollout side of a run: implements `protocols.Generation`.

    The trainer must call `mark_trained` for a batch before `begin_version` of the resulting version.

    Args:
        config: of the run.
        prompts: to train on.
        held_out: to evaluate on.
        engines: of the start, at least one; they have loaded.
        queue: to the trainer.
        rewards: scores responses.
        decode: tokens to a response.
        ledger: new, or restored from a checkpoint.
        version: the version that the engines sample from at the start.
        clock: monotonic seconds.
        timeouts: of aborts and puts.
    """

    def __init__(  # noqa: PLR0913 - the seams of a run
        self,
        config: RunConfig,
        prompts: PromptSet,
        held_out: PromptSet | None,
        *,
        engines: Mapping[EngineId, Engine],
        queue: Queue[Any],
        rewards: Scorer,
        decode: Decode,
        ledger: Ledger,
        version: int,
        clock: Clock = time.monotonic,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self.config, self.prompts, self.queue, self.ledger = config, prompts, queue, ledger
        self._clock, self._timeouts = clock, timeouts
        self._engines, self._idle = EnginePool(engines), IdleMeter(clock)
        self._start_order = StartOrder(prompts.row, len(prompts), config)
        self._admission = Admission(config, len(engines), ledger, version, self._start_order)
        self._delivery_order = DeliveryOrder(self._admission.policy)
        self._accounting = Accounting(config, ledger, self._admission.queued)
        self._generator = GroupGenerator(
            config, self._engines, rewards, decode, clock, self._accounting.wasted, timeouts
        )
        self._evaluator = Evaluator(config, held_out, self._engines, rewards, decode, timeouts)
        self._failures = FailureStreak(ledger.total, self._admission.policy.max_concurrent, len(prompts))
        self._watchdog = Watchdog(config.rollout.group_timeout_s, clock)
        self._in_flight: dict[int, GroupRequest] = {}
        self._request_numbers = itertools.count()
        self._wake = asyncio.Event()
        self._stopping = False
        self._error: BaseException | None = None

    # ---- the run

    async def run(self) -> None:
        """Generate until the run has all its groups, the prompts are used up, or `stop`; then close the queue.

        On an error the queue stays open: a trainer must not take a failure for the end of the data.

        Raises:
            RewardError: the reward fails for every prompt from the start on.
            EngineError: the engines fail for every prompt.
            DataError: no prompt can be used.
            RunError: nothing finished for twice `rollout.group_timeout_s`.
        """
        self._idle.read()
        self._watchdog.progress()
        try:
            while self._error is None and not self._ended():
                self._wake.clear()
                await self._admit()
                self._delivery_order.release_next(self._admission.accepted(self._in_flight), self._in_flight)
                self._watchdog.check(self._in_flight.values())
                await self._sleep()
        finally:
            self._idle.finish()
            await self._end_requests()
        if self._error is not None:
            raise self._error
        await self.queue.close()

    async def stop(self) -> None:
        """End `run` soon: cancel the groups in flight, counted as "stopped", and close the queue."""
        self._stopping = True
        self._wake.set()

    def _ended(self) -> bool:
        return self._stopping or self._admission.complete() or self._admission.exhausted(self._in_flight)

    async def _sleep(self) -> None:
        # Not wait_for: in Python 3.11 it loses a cancellation that arrives together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(TICK_S, self.config.rollout.group_timeout_s / 2)):
                await self._wake.wait()

    async def _end_requests(self) -> None:
        """Cancel all requests, and wait for those that deliver: a cancelled put may have stored its group."""
        self._stopping = True
        self._delivery_order.release_all()
        tasks = [request.task for request in self._in_flight.values() if request.task is not None]
        for request in list(self._in_flight.values()):
            if request.stage != "delivering":
                self._cancel(request, "stopped")
        if tasks:
            timeouts = self._timeouts
            _, left = await asyncio.wait(tasks, timeout=timeouts.put_s + timeouts.abort_s + timeouts.answer_s)
            if left:
                LOG.warning("%d groups did not end: %s", len(left), list(self._in_flight))

    async def _admit(self) -> None:
        while not self._stopping and (uid := self._admission.next(self._in_flight, self._clock())) is not None:
            if self._evaluator.exclusive or self._accounting.crashes.must_wait(uid, self._in_flight.values()):
                return
            self._admission.start(uid)
            try:
                prompt = self.prompts.prompt(uid)
            except UnusablePromptError as error:
                self._accounting.unusable(uid, error)
                self._failures.unusable(error)
                await asyncio.sleep(0)  # many such prompts in a row must not block the event loop
                continue
            self._failures.usable()
            request = GroupRequest(prompt, next(self._request_numbers), self._admission.version, self._clock())
            self._in_flight[uid] = request
            request.task = asyncio.create_task(self._process(request))
            request.task.add_done_callback(partial(self._request_done, request))

    # ---- one group

    async def _process(self, request: GroupRequest) -> None:
        try:
            with self._idle.activity():
                completions = await self._generator.generate(request, self.ledger.failures(request.uid))
            self._failures.generated()
            self._accounting.generated(request.uid, completions)
            request.stage = "scoring"
            group = await self._generator.score(request, completions)
            self._failures.rewarded()
        except RequestFailed as failure:
            if self._in_flight.get(request.uid) is request:  # else cancelled, and accounted for already
                del self._in_flight[request.uid]
                self._request_failed(request, failure)
            return
        self._watchdog.progress()
        self._accounting.metrics.add_group(group, self._clock() - request.started)
        self._start_order.finished(request.uid, request.started, self._clock())
        request.stage = "delivering"
        self._wake.set()
        async with self._delivery_order.delivery(request):
            await self._put(request, group)

    async def _put(self, request: GroupRequest, group: Group) -> None:
        """Put the group into the queue, waiting for room as long as the group is needed.

        It counts as queued from the first attempt on: the trainer may report it as trained before `put` returns.
        """
        payload = group.to_bytes()
        usable = self._admission.policy.usable_version(group.oldest_version, group.newest_version)
        delivery = Delivery(group.header(len(payload), usable), payload)
        self._accounting.queued(request.uid, usable)
        while not self._admission.too_old(usable) and not self._stopping:
            try:
                dropped = await self.queue.put([delivery], self._timeouts.put_s)
            except TimeoutError:
                continue
            self._drop(dropped, "queue_full")
            return
        self._drop([request.uid], "stopped" if self._stopping else "stale")

    def _request_done(self, request: GroupRequest, task: asyncio.Task[None]) -> None:
        if self._in_flight.get(request.uid) is request:
            del self._in_flight[request.uid]
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake.set()

    def _request_failed(self, request: GroupRequest, failure: RequestFailed) -> None:
        if failure.reason != "engine_lost":
            self._accounting.failed(request.uid, failure)
            self._failures.failed(request.uid, failure)
            return
        self._resize()
        held_out = request.engine is not None and self._engines.died_beside_held_out(request.engine)
        if isinstance(failure.__cause__, EngineCrashedError) and not held_out:
            self._accounting.crashed(request)
        else:  # nothing shows that the prompt is the cause, or the engines that are left
            self._drop([request.uid], failure.reason)

    def _drop(self, uids: Sequence[int], reason: str) -> None:
        self._accounting.dropped(uids, reason)
        self._wake.set()

    def _cancel(self, request: GroupRequest, reason: str) -> None:
        self._remove(request)
        self._accounting.cancelled(request.uid, reason)
        self._wake.set()

    def _remove(self, request: GroupRequest) -> None:
        del self._in_flight[request.uid]
        if request.task is not None:
            request.task.cancel()

    # ---- the engines

    async def add_engine(self, engine_id: EngineId, engine: Engine) -> None:
        self._engines.add(engine_id, engine)
        self._accounting.metrics.count("engines_joined")
        self._resize()

    async def remove_engine(self, engine_id: EngineId, reason: str, drain_s: float = 0.0) -> int:
        await self.cordon_engine(engine_id)
        if drain_s:
            await self._engines.drained(engine_id, drain_s)
        else:  # requests of a dead engine fail by themselves, and their errors tell a crash from another loss
            await self._engines.quiet(engine_id, self._timeouts.answer_s)
        finished = self._engines.remove(engine_id)
        self._accounting.metrics.count("engines_removed")
        self._resize()
        for request in list(self._in_flight.values()):
            if request.stage == "generating" and request.engine == engine_id:
                self._cancel(request, reason)
        crashes = self._accounting.crashes, self._evaluator.crashes
        return finished + sum(counted.take_quarantined(engine_id) for counted in crashes)

    async def cordon_engine(self, engine_id: EngineId) -> None:
        self._engines.cordon(engine_id, self._admission.version)
        self._resize()

    async def uncordon_engine(self, engine_id: EngineId) -> None:
        self._engines.uncordon(engine_id)
        self._resize()

    async def lost_engines(self) -> Mapping[EngineId, str]:
        return self._engines.lost()

    def _resize(self) -> None:
        self._admission.resize(len(self._engines))
        self._wake.set()

    # ---- the trainer's calls

    async def begin_version(self, version: int) -> None:
        """The engines now sample from `version`: cancel groups that became too old, admit more.

        A group that is being scored is not cancelled, because that would kill its reward worker; it is dropped after.

        Raises:
            RunError: the version goes backwards.
        """
        self._admission.begin_version(version, self._clock())
        self._engines.forgive()
        for request in list(self._in_flight.values()):
            kept = self._engines.kept_version(request.engine)
            newest = version if kept is None else kept
            if request.stage == "generating" and self._admission.must_cancel(request.version, newest):
                # With "drop" the request may have spent the time in the engine's waiting queue, and with "mask" its
                # engine got no newer version: neither shows that the prompt takes too long.
                if self.config.asynchrony.staleness_strategy in ("drop", "mask"):
                    self._cancel(request, "stale")
                else:
                    self._accounting.outlasted(request.uid)
                    self._remove(request)
        self._wake.set()

    async def mark_trained(self, uids: Sequence[int]) -> None:
        self._accounting.trained(uids)
        self._start_order.trained(uids)
        self._wake.set()

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        self._drop(uids, reason)

    async def ledger_state(self) -> Mapping[str, object]:
        self.ledger.check()
        return self.ledger.state()

    async def evaluate(self, version: int, engine: EngineId | None = None) -> Evaluation:
        try:
            return await self._evaluator.evaluate(version, engine)
        finally:
            self._wake.set()  # a prompt that ran alone may have held up groups

    async def loads(self) -> Loads:
        return self._engines.loads.take()

    async def stats(self) -> Mapping[str, float]:
        """`idle`, `engines`, `deferred`, groups by stage, and the report of `Accounting.take`."""
        stages = Counter(request.stage for request in self._in_flight.values())
        return {
            "idle": self._idle.read(),
            "engines": float(len(self._engines)),
            "deferred": float(len(self._start_order)),
            **{stage: float(stages[stage]) for stage in ("generating", "scoring", "delivering")},
            **self._accounting.take(),
        }
