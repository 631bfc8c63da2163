"""The Rollouter: keeps the engines busy, within the staleness bound, and the books straight.

One task a group: generate on the least loaded engine, score, put into the queue. `run` starts such tasks whenever the
staleness policy admits more, and watches over them. All of it is one event loop and one thread; nothing here blocks.
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
from tidemill.records import Group
from tidemill.rollout.accounting import Books
from tidemill.rollout.activity import Clock, IdleMeter
from tidemill.rollout.admission import Admission
from tidemill.rollout.deferral import Deferral
from tidemill.rollout.delivery_order import Turns
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.evaluator import Evaluator
from tidemill.rollout.failures import FailureStreak, FlightFailure, Watchdog
from tidemill.rollout.in_flight import ABORT_TIMEOUT_S, ANSWER_TIMEOUT_S, Decode, Flight, Scorer
from tidemill.rollout.ledger import Ledger
from tidemill.rollout.producer import Producer
from tidemill.rollout.prompts import PromptSet

LOG = logging.getLogger(__name__)

PUT_TIMEOUT_S = 1.0  # of one attempt; between two it is seen whether the group is still wanted
TICK_S = 1.0  # between two looks at a run in which nothing happens


class Rollouter:
    """The rollout side of a run: implements `protocols.Generation`.

    The trainer must call `mark_trained` for what it trained before `begin_version` of the resulting version.

    Args:
        config: of the run.
        prompts: to train on.
        held_out: to evaluate on.
        engines: at least one; named "engine 0", "engine 1", ... as in `Synchronizer`.
        queue: to the trainer.
        rewards: scores responses.
        decode: response tokens to text.
        ledger: new, or restored from a checkpoint.
        version: the version that the engines sample from at the start.
        clock: monotonic seconds.
    """

    def __init__(  # noqa: PLR0913 - the seams of a run
        self,
        config: RunConfig,
        prompts: PromptSet,
        held_out: PromptSet | None,
        *,
        engines: Sequence[Engine],
        queue: Queue[Any],
        rewards: Scorer,
        decode: Decode,
        ledger: Ledger,
        version: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config, self.prompts, self.queue, self.ledger = config, prompts, queue, ledger
        pool, idle = EnginePool(engines), IdleMeter(clock)
        self._engines, self._idle, self._clock = pool, idle, clock
        self._deferral = Deferral(prompts.row, len(prompts), config)
        self._admission = Admission(config, len(engines), ledger, version, self._deferral)
        self._turns = Turns(self._admission.policy)
        self._books = Books(config, ledger, self._admission.queued)
        self._producer = Producer(config, pool, rewards, decode, idle, clock, self._books.waste)
        self._evaluator = Evaluator(config, held_out, pool, rewards, decode)
        self._streak = FailureStreak(ledger.total, self._admission.policy.max_concurrent, len(prompts))
        self._watchdog = Watchdog(config.rollout.group_timeout_s, clock)
        self._flights: dict[int, Flight] = {}
        self._kept: dict[str, int] = {}  # version of an engine that gets no newer one, by its name
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._stopping = False
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Generate until the run has all its groups, the prompts are used up, or `stop`; then close the queue.

        On an error the queue stays open: a trainer must not take a failure for the end of the data.

        Raises:
            RewardError: the reward fails for every prompt from the start on.
            EngineError: the engines fail for every prompt.
            DataError: every prompt is too long.
            RunError: nothing finished for twice `rollout.group_timeout_s`.
        """
        self._idle.read()
        self._watchdog.progress()
        try:
            while self._error is None and not self._ended():
                self._wake.clear()
                await self._admit()
                self._turns.next(self._admission.settled(self._flights), self._flights)
                self._watchdog.look(self._flights.values())
                await self._sleep()
        finally:
            self._idle.finish()
            await self._land_all()
        if self._error is not None:
            raise self._error
        await self.queue.close()

    async def stop(self) -> None:
        """End `run` soon: abandon what is in flight, counted as "stopped", and close the queue."""
        self._stopping = True
        self._wake.set()

    def _ended(self) -> bool:
        """Nothing more is wanted, or can be trained."""
        return self._stopping or self._admission.complete() or self._admission.exhausted(self._flights)

    async def _sleep(self) -> None:
        # Not wait_for, which forgets a cancellation that comes together with the event (Python 3.11).
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(TICK_S, self.config.rollout.group_timeout_s / 2)):
                await self._wake.wait()

    async def _land_all(self) -> None:
        """Leave no task behind; not by cancelling a put, whose group might be stored all the same."""
        self._stopping = True
        self._turns.open()
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for flight in list(self._flights.values()):
            if flight.stage != "delivering":
                self._abandon(flight, "stopped")
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=PUT_TIMEOUT_S + ABORT_TIMEOUT_S + ANSWER_TIMEOUT_S)
            if left:
                LOG.warning("%d groups did not end: %s", len(left), list(self._flights))

    async def _admit(self) -> None:
        while not self._stopping and (uid := self._admission.next(self._flights, self._clock())) is not None:
            if self._evaluator.alone or self._books.suspects.must_wait(uid, self._flights.values()):
                return
            self._admission.start(uid)
            prompt = self.prompts.prompt(uid)
            if self.prompts.too_long(prompt):
                self._books.too_long(uid, len(prompt.token_ids))
                self._streak.too_long(self.config.data.max_prompt_tokens)
                await asyncio.sleep(0)  # a long row of such prompts must not hold up the event loop
                continue
            self._streak.fits()
            flight = Flight(prompt, next(self._numbers), self._admission.version, self._clock())
            self._flights[uid] = flight
            flight.task = asyncio.create_task(self._fly(flight))
            flight.task.add_done_callback(partial(self._landed, flight))

    async def _fly(self, flight: Flight) -> None:
        try:
            completions = await self._producer.generate(flight, self.ledger.failures(flight.uid))
            self._streak.generated()
            self._books.generated(flight.uid, completions)
            flight.stage = "scoring"
            group = await self._producer.score(flight, completions)
            self._streak.rewarded()
        except FlightFailure as failure:
            if self._flights.get(flight.uid) is flight:  # else abandoned, and accounted for already
                del self._flights[flight.uid]
                self._failed(flight, failure)
            return
        self._watchdog.progress()
        self._books.tally.group(group, self._clock() - flight.started)
        self._deferral.finished(flight.uid, flight.started, self._clock())
        await self._deliver(flight, group)

    async def _deliver(self, flight: Flight, group: Group) -> None:
        """Put into the queue when its turn has come, waiting as long as the group is wanted."""
        flight.stage = "delivering"
        self._wake.set()
        async with self._turns.turn(flight):
            await self._put(flight, group)

    async def _put(self, flight: Flight, group: Group) -> None:
        """It counts as queued from the first attempt on: the trainer may be done with it before we hear of it."""
        payload = group.to_bytes()
        usable = self._admission.policy.usable_version(group.oldest_version, group.newest_version)
        delivery = Delivery(group.header(len(payload), usable), payload)
        self._books.queued(flight.uid, usable)
        while not self._admission.too_old(usable) and not self._stopping:
            try:
                dropped = await self.queue.put([delivery], PUT_TIMEOUT_S)
            except TimeoutError:
                continue
            self._drop(dropped, "queue_full")
            return
        self._drop([flight.uid], "stopped" if self._stopping else "stale")

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        if self._flights.get(flight.uid) is flight:
            del self._flights[flight.uid]
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._wake.set()

    def _failed(self, flight: Flight, failure: FlightFailure) -> None:
        if failure.reason == "engine_lost":
            self._resize()
            held_out = self._engines.died_beside_held_out(str(flight.engine))
            if isinstance(failure.__cause__, EngineCrashedError) and not held_out:
                self._books.crashed(flight)
            else:  # no fault of the prompt that one could know of, nor of the engines that are left
                self._drop([flight.uid], failure.reason)
            return
        self._books.failed(flight.uid, failure)
        self._streak.failed(flight.uid, failure)

    def _drop(self, uids: Sequence[int], reason: str) -> None:
        self._books.dropped(uids, reason)
        self._wake.set()

    def _abandon(self, flight: Flight, reason: str) -> None:
        self._forget(flight)
        self._books.cancelled(flight.uid, reason)
        self._wake.set()

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.uid]
        if flight.task is not None:
            flight.task.cancel()

    def _resize(self) -> None:
        self._admission.resize(len(self._engines))
        self._wake.set()

    async def add_engine(self, name: str, engine: Engine) -> None:
        """One more engine takes groups; it must have the newest version."""
        self._engines.add(name, engine)
        self._books.tally.count("engines_joined")
        self._resize()

    async def remove_engine(self, name: str, reason: str, patience_s: float = 0.0) -> int:
        """An engine gets no more groups; what it has not finished in time is dropped for `reason` and issued again.

        Returns:
            How many requests it had answered, and how many prompts were set aside because they killed it.
        """
        self._close(name)
        if patience_s:
            await self._engines.drained(name, patience_s)
        else:  # requests whose engine died say so by themselves, which tells whether it died under them
            await self._engines.quiet(name, ANSWER_TIMEOUT_S)
        finished = self._engines.remove(name)
        self._kept.pop(name, None)
        self._books.tally.count("engines_removed")
        self._resize()
        for flight in self._on_engine(name):
            self._abandon(flight, reason)
        return finished + self._books.suspects.explained(name) + self._evaluator.suspects.explained(name)

    def _on_engine(self, name: str) -> list[Flight]:
        return [f for f in self._flights.values() if f.stage == "generating" and f.engine == name]

    async def set_engine_aside(self, name: str) -> None:
        """An engine gets no more groups, and finishes those that it has; only an evaluation may name it."""
        self._close(name)

    def _close(self, name: str) -> None:
        """It gets no more groups, and no newer version either."""
        self._engines.close(name)
        self._kept[name] = self._admission.version
        self._resize()

    async def take_engine_back(self, name: str) -> None:
        """It gets groups again."""
        self._engines.reopen(name)
        self._kept.pop(name, None)
        self._resize()

    async def lost_engines(self) -> Mapping[str, str]:
        """Engines that do not work any more and are to be removed, and why."""
        return self._engines.lost()

    async def begin_version(self, version: int) -> None:
        """The engines now sample from `version`: cancel what became too old, admit more.

        A group that is being scored is not cancelled, because that would kill its reward worker; it is dropped after.

        Raises:
            RunError: the version goes backwards.
        """
        self._admission.begin_version(version, self._clock())
        self._engines.forgive()
        for flight in list(self._flights.values()):
            newest = self._kept.get(str(flight.engine), version)
            if flight.stage == "generating" and self._admission.overtaken(flight.version, newest):
                # With "drop" it may just have waited in the engine, with "mask" its engine got no newer version.
                if self.config.asynchrony.staleness_strategy in ("drop", "mask"):
                    self._abandon(flight, "stale")
                else:
                    self._books.outlasted(flight.uid)
                    self._forget(flight)
        self._wake.set()

    async def mark_trained(self, uids: Sequence[int]) -> None:
        """These occurrences are in the parameters now.

        Raises:
            RunError: one of them was trained before or never queued.
        """
        self._books.trained(uids)
        self._deferral.trained(uids)
        self._wake.set()

    async def reissue(self, uids: Sequence[int], reason: str) -> None:
        """These groups were dropped on the way; count them and generate them again."""
        self._drop(uids, reason)

    async def ledger_state(self) -> Mapping[str, object]:
        """JSON value for `Ledger.restore`.

        Raises:
            RunError: the books do not balance.
        """
        self.ledger.check()
        return self.ledger.state()

    async def evaluate(self, version: int, engine: str | None = None) -> Evaluation:
        """Score the held-out prompts; the weights must stay at `version` meanwhile. See `Evaluator.evaluate`."""
        try:
            return await self._evaluator.evaluate(version, engine)
        finally:
            self._wake.set()  # a suspect among the prompts may have held up groups

    async def loads(self) -> Loads:
        """Requests in flight since the last call; see `LoadMeter.take`."""
        return self._engines.loads.take()

    async def stats(self) -> Mapping[str, float]:
        """`idle`, `engines`, `deferred`, groups by stage, and what `Books.take` returns."""
        stages = Counter(flight.stage for flight in self._flights.values())
        return {
            "idle": self._idle.read(),
            "engines": float(len(self._engines)),
            "deferred": float(len(self._deferral)),
            **{stage: float(stages[stage]) for stage in ("generating", "scoring", "delivering")},
            **self._books.take(),
        }
