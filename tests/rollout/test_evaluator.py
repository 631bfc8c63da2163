from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from rollout_rig import BROKEN, LengthReward, Rig, decode, held_out, run_config

from tidemill.errors import ConfigError, EngineError, EngineLostError, RewardError, RewardTimeoutError
from tidemill.fakes import FakeEngine
from tidemill.protocols import Sampling, WeightUpdate
from tidemill.records import Completion, EngineId, Int32Array
from tidemill.rollout.engine_pool import EnginePool
from tidemill.rollout.evaluator import Evaluator

pytestmark = pytest.mark.own_time


async def test_rewards_get_the_number_of_tokens_of_an_answer() -> None:
    seen: list[int] = []

    class Spy(LengthReward):
        async def score(self, prompt: Any, responses: Any) -> Any:
            seen.extend(response.tokens for response in responses)
            return await super().score(prompt, responses)

    rig = Rig(held_out=held_out(), rewards=Spy())
    evaluation = await rig.rollouter.evaluate(0)
    assert seen
    assert sorted(seen) == sorted(len(answer.response) for answer in evaluation.answers)  # one character a token


async def test_an_evaluation_is_greedy_in_the_order_of_the_data_and_carries_its_version() -> None:
    rig = Rig(held_out=held_out(), engines=[FakeEngine(), FakeEngine()])
    evaluation = await rig.rollouter.evaluate(0)
    assert [answer.expected for answer in evaluation.answers] == list("012345")
    assert (evaluation.version, evaluation.score, evaluation.skipped) == (0, 4.0, {})
    samplings = [sampling for engine in rig.engines for _, sampling in engine.requests]
    assert {(sampling.n, sampling.temperature) for sampling in samplings} == {(1, 0.0)}


async def test_held_out_prompts_go_before_rollouts_and_end_at_the_same_strings() -> None:
    rig = Rig(run_config(rollout={"stop": ["###"]}, trainer={"steps": 1}), held_out=held_out())
    await rig.run()
    await rig.rollouter.evaluate(1)
    samplings: dict[bool, set[tuple[int, tuple[str, ...], int]]] = {True: set(), False: set()}
    for request_id, sampling in rig.engines[0].requests:
        asked = (sampling.priority, sampling.stop, sampling.max_tokens)
        samplings[request_id.startswith("evaluation")].add(asked)
    assert samplings == {True: {(-1, ("###",), 8)}, False: {(0, ("###",), 8)}}


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


async def test_max_prompts_limits_an_evaluation_and_too_long_prompts_are_reported() -> None:
    limit = len("<user>3!!!<assistant>")
    config = run_config(data={"held_out": "y.jsonl"}, evaluation={"max_prompts": 5})
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


async def test_a_reward_that_times_out_has_its_own_reason() -> None:
    rig = Rig(held_out=held_out(), rewards=LengthReward({1: RewardTimeoutError("slow"), 2: BROKEN}))
    assert (await rig.rollouter.evaluate(0)).skipped == {"reward_timeout": 1, "reward_error": 1}


class Once(FakeEngine):
    """Hangs at the first request, or aborts it; answers the others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        self.requests.append((request_id, sampling))
        if len(self.requests) > 1:
            return await super().generate(request_id, prompt_ids, sampling)
        if self.kind == "hang":
            await asyncio.sleep(60)
        return [replace(c, finish_reason="abort") for c in await super().generate(request_id, prompt_ids, sampling)]


@pytest.mark.parametrize("kind", ["hang", "abort"])
async def test_a_request_that_hangs_or_is_aborted_is_repeated_under_another_id(kind: str) -> None:
    rig = Rig(run_config(rollout={"group_timeout_s": 0.2}), held_out=held_out(1), engines=[engine := Once(kind)])
    assert (await rig.rollouter.evaluate(0)).score == 4.0
    first, second = dict.fromkeys(name for name, _ in engine.requests)
    assert first != second
    assert engine.aborted == ([first] if kind == "hang" else [])


async def test_an_evaluation_that_fails_leaves_no_request_behind() -> None:
    class Half(FakeEngine):
        async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
            if request_id.startswith("evaluation-3."):
                raise EngineError("no such prompt")
            return await super().generate(request_id, prompt_ids, sampling)

    rig = Rig(held_out=held_out(), engines=[Half(lengths=(8, 8), token_delay_s=5.0)])
    with pytest.raises(EngineError, match="held-out prompt 3 failed 3 times"):
        await rig.rollouter.evaluate(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await rig.engines[0].stats())["running"] == 0
    assert len(rig.engines[0].aborted) == 5


async def test_a_named_engine_answers_alone_within_its_own_limit() -> None:
    config = run_config(rollout={"concurrent_samples_per_replica": 2})
    rig = Rig(config, held_out=held_out(8), engines=[FakeEngine(), FakeEngine(token_delay_s=0.01)])
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0, EngineId(1)))
    most = 0.0
    while not evaluation.done():
        most = max(most, (await rig.engines[1].stats())["running"])
        await asyncio.sleep(0.002)
    assert (most, rig.engines[0].requests, len((await evaluation).answers)) == (2, [], 8)


async def test_a_named_engine_that_is_lost_is_not_replaced_by_another() -> None:
    rig = Rig(held_out=held_out(), engines=[FakeEngine(), FakeEngine()])
    await rig.engines[1].shutdown()
    with pytest.raises(EngineLostError):
        await rig.rollouter.evaluate(0, EngineId(1))
    assert rig.engines[0].requests == []


class Refusing(FakeEngine):
    async def generate(self, request_id: str, prompt_ids: Int32Array, sampling: Sampling) -> list[Completion]:
        raise EngineError("no such prompt")


async def test_an_engine_that_keeps_failing_ends_the_evaluation() -> None:
    rig = Rig(held_out=held_out(), engines=[Refusing()])
    with pytest.raises(EngineError, match="failed 3 times: EngineError: no such prompt"):
        await rig.rollouter.evaluate(0)


async def test_prompts_of_an_engine_that_dies_go_to_the_others() -> None:
    rig = Rig(held_out=held_out(), engines=[FakeEngine(token_delay_s=0.01), FakeEngine(token_delay_s=0.01)])
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    await asyncio.sleep(0.015)
    await rig.engines[0].shutdown()
    assert (await evaluation).score == 4.0
    assert await rig.rollouter.lost_engines() == {EngineId(0): "fake engine: it was shut down"}


async def test_a_prompt_that_may_crash_its_engine_is_generated_while_nothing_else_is_in_flight() -> None:
    pool = EnginePool({EngineId(0): (engine := FakeEngine())})
    evaluator = Evaluator(run_config(), held_out(1), pool, LengthReward(), decode)
    for engine_id in (EngineId(7), EngineId(8)):
        evaluator.crashes.crashed(0, engine_id)
    with pool.lease():
        evaluation = asyncio.create_task(evaluator.evaluate(0))
        await asyncio.sleep(1.0)
        assert (evaluator.exclusive, engine.requests) == (True, [])
    assert (await evaluation).score == 4.0
    assert not evaluator.exclusive


async def test_an_evaluation_without_engines_waits_for_the_next_engine_within_a_deadline() -> None:
    rig = Rig(run_config(rollout={"start_timeout_s": 0.2}), held_out=held_out())
    await rig.engines[0].shutdown()
    with pytest.raises(EngineError, match=r"all engines are lost, and no other one has joined within 0\.2 s"):
        await rig.rollouter.evaluate(0)
    evaluation = asyncio.create_task(rig.rollouter.evaluate(0))
    await rig.rollouter.add_engine(EngineId(1), FakeEngine())
    assert (await evaluation).score == 4.0


async def test_an_evaluation_without_held_out_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.held_out"):
        await Rig().rollouter.evaluate(0)
