from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from tidemill.errors import EngineError
from tidemill.fakes import FakeEngine, Fault, spans_of
from tidemill.protocols import Sampling, WeightUpdate
from tidemill.records import Completion, VersionSpan

pytestmark = pytest.mark.own_time

PROMPT = np.array([1, 2, 3], dtype=np.int32)


def sampling(seed: int | None = 0, temperature: float = 1.0, max_tokens: int = 8) -> Sampling:
    return Sampling(n=3, max_tokens=max_tokens, temperature=temperature, seed=seed)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


async def test_the_same_request_gives_the_same_tokens_and_another_seed_others() -> None:
    first = tokens(await FakeEngine().generate("0.0", PROMPT, sampling()))
    assert first == tokens(await FakeEngine(token_delay_s=0.001).generate("7.7", PROMPT, sampling()))
    assert first != tokens(await FakeEngine().generate("0.0", PROMPT, sampling(seed=1)))
    assert len(set(map(tuple, first))) == 3


async def test_greedy_samples_are_all_the_same() -> None:
    assert len(set(map(tuple, tokens(await FakeEngine().generate("0.0", PROMPT, sampling(temperature=0)))))) == 1


async def test_log_probs_agree_with_score_and_lengths_with_the_budget() -> None:
    engine = FakeEngine(vocab=10, lengths=(1, 20))
    completions = await engine.generate("0.0", PROMPT, sampling())
    assert all(np.allclose(c.log_probs, -math.log(10)) for c in completions)
    assert np.allclose(await engine.score(PROMPT), [-math.log(10)] * 2)
    assert all((c.finish_reason == "length") == (len(c.token_ids) == 8) for c in completions)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_an_update_midway_is_recorded_in_the_spans_and_loses_no_token(mode: Any) -> None:
    engine = FakeEngine(lengths=(8, 8), token_delay_s=0.005)
    request = asyncio.create_task(engine.generate("0.0", PROMPT, sampling()))
    await asyncio.sleep(0.02)
    await engine.update_weights(WeightUpdate(1, "", 0), mode)
    for completion in await request:
        assert [span.version for span in completion.versions] == [0, 1]
        assert len(completion.token_ids) == 8


async def test_an_update_that_waits_lets_requests_finish_with_their_version_and_holds_new_ones() -> None:
    engine = FakeEngine(token_delay_s=0.005)
    old = asyncio.create_task(engine.generate("0.0", PROMPT, sampling()))
    await asyncio.sleep(0.005)
    update = asyncio.create_task(engine.update_weights(WeightUpdate(1, "", 0), "wait"))
    await asyncio.sleep(0)
    new = asyncio.create_task(engine.generate("1.0", PROMPT, sampling()))
    await update
    assert {span.version for completion in await old for span in completion.versions} == {0}
    assert {span.version for completion in await new for span in completion.versions} == {1}


async def test_an_aborted_request_returns_what_it_has() -> None:
    engine = FakeEngine(lengths=(8, 8), token_delay_s=0.005)
    request = asyncio.create_task(engine.generate("0.0", PROMPT, sampling()))
    await asyncio.sleep(0.02)
    await engine.abort(["0.0", "unknown"])
    for completion in await request:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < 8


async def test_faults_hit_the_given_occurrence_the_given_number_of_times() -> None:
    engine = FakeEngine(faults={4: Fault("error", times=2), 5: Fault("empty"), 6: Fault("abort")})
    for attempt in range(2):
        with pytest.raises(EngineError, match="told to fail"):
            await engine.generate(f"4.{attempt}", PROMPT, sampling())
    assert len(await engine.generate("4.2", PROMPT, sampling())) == 3
    assert tokens(await engine.generate("5.3", PROMPT, sampling())) == [[], [], []]
    assert {c.finish_reason for c in await engine.generate("6.4", PROMPT, sampling())} == {"abort"}


async def test_after_shutdown_requests_fail_also_those_in_flight() -> None:
    engine = FakeEngine(faults={0: Fault("hang")})
    request = asyncio.create_task(engine.generate("0.0", PROMPT, sampling()))
    await asyncio.sleep(0)
    await engine.shutdown()
    for call in (request, engine.generate("1.0", PROMPT, sampling())):
        with pytest.raises(EngineError, match="shut down"):
            await call


async def test_a_script_answers_by_prompt_version_and_sample() -> None:
    engine = FakeEngine(script=lambda prompt, version, sample: [len(prompt), version, sample])
    assert tokens(await engine.generate("0.0", PROMPT, sampling())) == [[3, 0, 0], [3, 0, 1], [3, 0, 2]]


def test_spans_are_the_runs_of_equal_versions() -> None:
    assert spans_of([4, 4, 5]) == (VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))
    assert spans_of([]) == ()
