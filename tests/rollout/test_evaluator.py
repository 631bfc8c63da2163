from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_rig import BROKEN, CharTokenizer, LengthReward, Rig, run_config

from tidemill.errors import ConfigError, EngineError, RewardError
from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling, WeightUpdate
from tidemill.records import Completion, Int32Array
from tidemill.rollout.prompts import PromptSet
from tidemill.sections import DataConfig


def held_out(count: int = 6, **config: Any) -> PromptSet:
    rows = [{"prompt": f"{n}{'!' * n}", "answer": str(n)} for n in range(count)]
    return PromptSet(rows, CharTokenizer(), DataConfig(train="x.jsonl", **config), seed=0)


async def test_an_evaluation_is_greedy_in_the_order_of_the_data_and_carries_its_version() -> None:
    rig = Rig(held_out=held_out(), engines=[FakeEngine(), FakeEngine()])
    evaluation = await rig.rollouter.evaluate(0)
    assert [answer.expected for answer in evaluation.answers] == list("012345")
    assert (evaluation.version, evaluation.score, evaluation.skipped) == (0, 4.0, {})
    samplings = [sampling for engine in rig.engines for _, sampling in engine.requests]
    assert {(sampling.n, sampling.temperature) for sampling in samplings} == {(1, 0.0)}


async def test_two_evaluations_of_the_same_version_are_equal() -> None:
    rig = Rig(held_out=held_out())
    assert await rig.rollouter.evaluate(0) == await rig.rollouter.evaluate(0)


async def test_an_answer_of_another_version_is_refused() -> None:
    rig = Rig(held_out=held_out())
    with pytest.raises(EngineError, match=r"answered by versions \[0\], not by 1 alone"):
        await rig.rollouter.evaluate(1)


async def test_weights_that_change_midway_are_noticed() -> None:
    rig = Rig(held_out=held_out(), token_delay_s=0.02)
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    await asyncio.sleep(0.05)
    await rig.engines[0].update_weights(WeightUpdate(1, "", 0), "keep")
    with pytest.raises(EngineError, match=r"answered by versions \[1\]"):
        await evaluation


async def test_no_more_prompts_are_scored_than_asked_for_and_too_long_ones_are_reported() -> None:
    limit = len("<user>3!!!<assistant>")
    config = run_config(evaluation={"max_prompts": 5})
    rig = Rig(config, held_out=held_out(max_prompt_tokens=limit))
    evaluation = await rig.rollouter.evaluate(0)
    assert [answer.expected for answer in evaluation.answers] == list("0123")
    assert evaluation.skipped == {"too_long": 1}


async def test_an_evaluation_runs_beside_training_rollouts() -> None:
    rig = Rig(run_config(asynchrony={"max_staleness": 0}), held_out=held_out(), token_delay_s=0.005)
    run = asyncio.create_task(rig.rollouter.run())
    await asyncio.sleep(0.01)
    assert len((await rig.rollouter.evaluate(0)).answers) == 6
    assert await rig.train() == 5
    await asyncio.wait_for(run, 5)


async def test_requests_run_side_by_side_up_to_the_limit() -> None:
    config = run_config(rollout={"concurrent_samples_per_replica": 2})
    rig = Rig(config, held_out=held_out(8), token_delay_s=0.01)
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    most = 0.0
    while not evaluation.done():
        most = max(most, (await rig.engines[0].stats())["running"])
        await asyncio.sleep(0.002)
    assert most == 2


async def test_a_prompt_whose_reward_fails_is_skipped_and_reported_but_not_all_of_them() -> None:
    some = Rig(held_out=held_out(), rewards=LengthReward({2: BROKEN}))
    evaluation = await some.rollouter.evaluate(0)
    assert (len(evaluation.answers), evaluation.skipped) == (5, {"reward_error": 1})
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        await Rig(held_out=held_out(), rewards=LengthReward(always=BROKEN)).rollouter.evaluate(0)


class Refusing(FakeEngine):
    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        raise EngineError("no such prompt")


async def test_an_engine_that_keeps_failing_ends_the_evaluation() -> None:
    rig = Rig(held_out=held_out(), engines=[Refusing()])
    with pytest.raises(EngineError, match="failed 3 times: EngineError: no such prompt"):
        await rig.rollouter.evaluate(0)


async def test_an_engine_that_dies_hands_its_prompts_to_the_others() -> None:
    rig = Rig(held_out=held_out(), engines=[FakeEngine(token_delay_s=0.01), FakeEngine(token_delay_s=0.01)])
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    await asyncio.sleep(0.015)
    await rig.engines[0].shutdown()
    assert (await evaluation).score == 4.0
    assert await rig.rollouter.lost_engines() == {"engine 0": "fake engine: it was shut down"}


async def test_an_evaluation_without_engines_waits_for_the_next_one_and_not_for_ever() -> None:
    rig = Rig(run_config(rollout={"start_timeout_s": 0.2}), held_out=held_out())
    await rig.engines[0].shutdown()
    with pytest.raises(EngineError, match=r"all engines are lost, and no other has come within 0\.2 s"):
        await rig.rollouter.evaluate(0)
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    await rig.rollouter.add_engine("engine 1", FakeEngine())
    assert (await evaluation).score == 4.0


async def test_an_evaluation_without_held_out_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        await Rig().rollouter.evaluate(0)
