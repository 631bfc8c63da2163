"""Evaluation outside of a run, where a single engine is replaced when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from fleet_rig import DEADLINE_S, CrashingMember
from rollout_rig import LengthReward, decode, held_out, run_config

from tidemill.errors import EngineError
from tidemill.protocols import Evaluation
from tidemill.records import EngineId
from tidemill.rollout.evaluator import Evaluator
from tidemill.rollout.offline import SingleEngine

pytestmark = pytest.mark.own_time


class Engines:
    """Engines that die of some held-out prompts; the ones from number `last` on do not start."""

    def __init__(self, deadly: Collection[int], last: int = 99) -> None:
        self.deadly = {f"evaluation-{row}" for row in deadly}
        self.last, self.made = last, list[Runner]()

    def make(self) -> Runner:
        self.made.append(Runner(self, len(self.made)))
        return self.made[-1]

    async def evaluate(self) -> Evaluation:
        engine = SingleEngine(self.make)
        await engine.start()
        evaluator = Evaluator(run_config(), held_out(), engine.pool, LengthReward(), decode)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await engine.during(evaluator.evaluate(0), evaluator.crashes.take_quarantined)
        finally:
            await engine.end()


class Runner(CrashingMember):
    def __init__(self, engines: Engines, number: int) -> None:
        super().__init__(EngineId(number), EngineError("no memory") if number >= engines.last else None)
        self.deadly, self.shut = engines.deadly, 0

    async def shutdown(self) -> None:
        self.shut += 1
        await super().shutdown()


async def test_a_prompt_that_kills_its_engine_is_skipped_and_every_engine_is_ended() -> None:
    engines = Engines({0, 4})
    score = await engines.evaluate()
    assert ([answer.expected for answer in score.answers], score.skipped) == (list("1235"), {"kills_engine": 2})
    assert len(engines.made) <= 2 * 3 + 1
    assert [engine.shut for engine in engines.made] == [1] * len(engines.made)


async def test_a_replacement_that_does_not_start_ends_the_evaluation_with_its_reason() -> None:
    with pytest.raises(EngineError, match="no memory"):
        await Engines({3}, last=1).evaluate()


async def test_engines_that_die_at_once_are_not_replaced_for_ever() -> None:
    engines = Engines(())

    class DeadOnArrival(Runner):
        async def start(self) -> None:
            await self.shutdown()

    engines.make = lambda: engines.made.append(DeadOnArrival(engines, len(engines.made))) or engines.made[-1]  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(EngineError, match="3 engines in a row died without finishing a request: engine 2 is dead"):
        await engines.evaluate()
