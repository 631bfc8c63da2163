"""What every `Engine` must do, run against the stand-in and against vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import pytest_asyncio

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import SyncError, TidemillError
from tidemill.fakes import FakeEngine
from tidemill.protocols import Engine, PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = np.arange(3, 13, dtype=np.int32)
BUDGET = 200
DEADLINE_S = 300.0
ATTEMPTS = 50  # at what an engine, which is a process of its own, may have done before a busy machine lets us go on
SAMPLING = Sampling(n=4, max_tokens=BUDGET, temperature=1.0)


@dataclass
class Case:
    engine: Engine
    refused: WeightUpdate
    weights: Callable[[int], WeightUpdate]
    newest: int = 0

    def next_update(self) -> WeightUpdate:
        self.newest += 1
        return self.weights(self.newest)

    async def midway(self, request_id: str = "r", sampling: Sampling = SAMPLING) -> asyncio.Task[list[Completion]]:
        """A group that has begun and is not done."""
        for _ in range(ATTEMPTS):
            task = asyncio.create_task(self.engine.generate(request_id, PROMPT, sampling))
            await asyncio.sleep(0.15)
            if not task.done():
                return task
        raise AssertionError("every group was done at once")


def fake_case() -> Case:
    engine = FakeEngine(vocab=96, lengths=(BUDGET, BUDGET), token_delay_s=0.005, refused=[999])
    return Case(engine, WeightUpdate(999, "nowhere", 1), lambda version: WeightUpdate(version, "nowhere", 0))


async def vllm_case(folder: Path) -> Case:
    from tiny_model import make_tiny_model, write_weights

    from tidemill.inference.engine import VllmEngine

    rollout = RolloutConfig(max_new_tokens=BUDGET, group_size=4, threads=1, dtype="float32")
    engine = VllmEngine(str(make_tiny_model(folder / "model", 0)), rollout, 32, 0, "shared_memory")
    await engine.start()
    return Case(
        engine,
        WeightUpdate(999, "nowhere", 1),
        lambda version: write_weights(folder / f"{version}.safetensors", version, version),
    )


# vLLM warns while it is imported; that is not ours to fail on.
ENGINES = ["fake", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.filterwarnings("default")])]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=ENGINES)
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    made = fake_case() if request.param == "fake" else await vllm_case(tmp_path_factory.mktemp("engine"))
    yield made
    await made.engine.shutdown()


async def test_a_group_has_n_aligned_samples_within_the_budget(case: Case) -> None:
    group = await case.engine.generate("g", PROMPT, Sampling(n=4, max_tokens=12, temperature=1.0))
    assert len(group) == 4
    for sample in group:
        assert 1 <= len(sample.token_ids) == len(sample.log_probs) == sample.versions[-1].end <= 12
        assert (sample.token_ids.dtype, sample.log_probs.dtype) == (np.int32, np.float32)
        assert (sample.log_probs <= 0).all()
        assert sample.finish_reason == ("length" if len(sample.token_ids) == 12 else "stop")


async def test_the_same_seed_gives_the_same_samples(case: Case) -> None:
    sampling = Sampling(n=2, max_tokens=8, temperature=1.0, seed=5)
    first, second = [await case.engine.generate("s", PROMPT, sampling) for _ in range(2)]
    assert [s.token_ids.tolist() for s in first] == [s.token_ids.tolist() for s in second]
    assert first[0].token_ids.tolist() != first[1].token_ids.tolist()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_new_requests_come_from_the_new_version(case: Case, mode: str) -> None:
    update = case.next_update()
    await case.engine.update_weights(update, mode)  # type: ignore[arg-type]
    assert await case.engine.version() == update.version
    group = await case.engine.generate("n", PROMPT, Sampling(n=2, max_tokens=4, temperature=1.0))
    assert {span.version for sample in group for span in sample.versions} == {update.version}


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_group_goes_on_over_an_update_within_its_budget(case: Case, mode: str) -> None:
    long = Sampling(n=4, max_tokens=BUDGET, temperature=0.0)
    for _ in range(ATTEMPTS):
        before, task = case.newest, await case.midway("o", long)
        await case.engine.update_weights(case.next_update(), mode)  # type: ignore[arg-type]
        group = await task
        for sample in group:
            assert len(sample.token_ids) == len(sample.log_probs) == sample.versions[-1].end <= BUDGET
            assert {span.version for span in sample.versions} <= {before, before + 1}
            assert sample.finish_reason != "abort"
        if any(len(sample.versions) == 2 for sample in group):
            return
    raise AssertionError("no sample was under way")


async def test_wait_lets_a_group_finish_first(case: Case) -> None:
    before, task = case.newest, await case.midway("w")
    await case.engine.update_weights(case.next_update(), "wait")
    assert {span.version for sample in await task for span in sample.versions} == {before}


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_an_update_that_fails_resumes_the_old_version_and_says_so(case: Case, mode: PauseMode) -> None:
    task = await case.midway(f"failed-{mode}")
    with pytest.raises(SyncError, match="999"):
        await case.engine.update_weights(case.refused, mode)
    assert await case.engine.version() == case.newest
    for sample in await asyncio.wait_for(task, DEADLINE_S):
        assert {span.version for span in sample.versions} == {case.newest}
        assert len(sample.token_ids) <= BUDGET
        assert sample.finish_reason != "abort"


async def test_updates_at_once_come_one_after_the_other_and_the_same_one_twice_is_harmless(case: Case) -> None:
    task = await case.midway("crowd")
    modes: list[PauseMode] = ["keep", "abort", "wait"]
    updates = [(case.next_update(), mode) for mode in modes]
    await asyncio.gather(*(case.engine.update_weights(*update) for update in [*updates, updates[-1]]))
    assert await case.engine.version() == case.newest
    for sample in await asyncio.wait_for(task, DEADLINE_S):
        versions = [span.version for span in sample.versions]
        assert versions == sorted(set(versions))
        assert len(sample.token_ids) == len(sample.log_probs) == sample.versions[-1].end <= BUDGET
    after = await case.engine.generate("after-crowd", PROMPT, Sampling(n=1, max_tokens=3, temperature=1.0))
    assert {span.version for span in after[0].versions} == {case.newest}


async def cut_often(case: Case) -> int:
    """Generate through aborting updates; returns how many samples have tokens of several versions."""
    sampling = Sampling(n=4, max_tokens=60, temperature=1.0)
    tasks = [asyncio.create_task(case.engine.generate(f"cut-{n}", PROMPT, sampling)) for n in range(3)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.05)
        await case.engine.update_weights(case.next_update(), "abort")
    samples = [sample for task in tasks for sample in task.result()]
    for sample in samples:
        assert len(sample.token_ids) == len(sample.log_probs) == sample.versions[-1].end == 60
        assert sample.finish_reason == "length"
    return sum(len(sample.versions) > 1 for sample in samples)


async def test_many_aborting_updates_leave_every_sample_within_its_budget(case: Case) -> None:
    cut = 0
    for _ in range(ATTEMPTS):
        cut = cut or await cut_often(case)
    assert cut > 0


@pytest.mark.parametrize("seed", range(3))
async def test_no_interleaving_of_updates_aborts_and_cancellations_leaves_an_engine_paused(
    case: Case, seed: int
) -> None:
    """Pauses that overlap, fail or come twice, and requests that end meanwhile."""
    random, sampling = Random(seed), Sampling(n=2, max_tokens=40, temperature=1.0)
    modes: list[PauseMode] = ["keep", "abort", "wait"]
    tasks = [asyncio.create_task(case.engine.generate(f"fuzz-{seed}-{n}", PROMPT, sampling)) for n in range(6)]
    cancelled, newest = tasks.pop(random.randrange(6)), case.next_update()
    updates = [asyncio.create_task(case.engine.update_weights(newest, "keep"))]
    for _ in range(12):
        await asyncio.sleep(random.choice([0, 0, 0.003, 0.03]))
        match random.choice(["update", "update", "refused", "again", "abort", "cancel"]):
            case "update":
                update = newest = case.next_update()
            case "refused":
                update = case.refused
            case "again":
                update = newest
            case "abort":
                await case.engine.abort([f"fuzz-{seed}-{random.randrange(6)}", "unknown"])
                continue
            case _:
                cancelled.cancel()
                continue
        updates.append(asyncio.create_task(case.engine.update_weights(update, random.choice(modes))))
    results = await asyncio.wait_for(asyncio.gather(*updates, return_exceptions=True), DEADLINE_S)
    await asyncio.gather(cancelled, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), SyncError}
    assert await case.engine.version() == case.newest
    for sample in [sample for group in await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S) for sample in group]:
        versions = [span.version for span in sample.versions]
        assert versions == sorted(set(versions))
        assert len(sample.token_ids) == len(sample.log_probs) <= 40
    after = await case.engine.generate(f"after-{seed}", PROMPT, Sampling(n=1, max_tokens=3, temperature=1.0))
    assert {span.version for span in after[0].versions} == {case.newest}


async def test_an_aborted_group_returns_what_it_has(case: Case) -> None:
    for _ in range(ATTEMPTS):
        task = await case.midway("a")
        await case.engine.abort(["a", "unknown"])
        group = await asyncio.wait_for(task, DEADLINE_S)
        assert len(group) == 4
        assert all(len(sample.token_ids) < BUDGET for sample in group if sample.finish_reason == "abort")
        if "abort" in {sample.finish_reason for sample in group}:
            return
    raise AssertionError("no sample was aborted")


async def test_an_abort_before_the_first_token_ends_the_group_too(case: Case) -> None:
    for _ in range(ATTEMPTS):
        task = asyncio.create_task(case.engine.generate("b", PROMPT, SAMPLING))
        await asyncio.sleep(0)
        await case.engine.abort(["b"])
        if "abort" in {sample.finish_reason for sample in await asyncio.wait_for(task, DEADLINE_S)}:
            return
    raise AssertionError("no sample was aborted")


async def test_cancelling_ends_the_request(case: Case) -> None:
    task = await case.midway("c")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await case.engine.stats())["running"] == 0


async def test_score_has_one_log_prob_for_each_token_but_the_first(case: Case) -> None:
    scores = await case.engine.score(PROMPT)
    assert scores.shape == (len(PROMPT) - 1,)
    assert scores.dtype == np.float32
    assert (scores < 0).all()


async def test_stats_count_tokens(case: Case) -> None:
    before = await case.engine.stats()
    group = await case.engine.generate("t", PROMPT, Sampling(n=2, max_tokens=3, temperature=1.0))
    after = await case.engine.stats()
    assert after.keys() >= {"running", "waiting", "generated_tokens", "rss_bytes"}
    assert after["generated_tokens"] - before["generated_tokens"] == sum(len(s.token_ids) for s in group)


@pytest.mark.asyncio
async def test_nothing_is_generated_after_shutdown() -> None:
    engine = FakeEngine()
    await engine.shutdown()
    with pytest.raises(TidemillError):
        await engine.generate("x", PROMPT, SAMPLING)
