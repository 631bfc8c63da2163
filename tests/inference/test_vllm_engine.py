"""The real engine: its numbers against transformers, its weights against a fresh engine, its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tiny_model import CONTEXT, make_tiny_model, tiny_llama, write_weights

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import ConfigError, EngineCrashedError, EngineError, EngineLostError, SyncError
from tidemill.inference.engine import VllmEngine
from tidemill.inference.engine_settings import GIB
from tidemill.protocols import PauseMode, Sampling, WeightUpdate
from tidemill.records import Completion, Float32Array

# vLLM warns while it is imported; that is not ours to fail on.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.filterwarnings("default")]
PROMPT = np.arange(3, 43, dtype=np.int32)
DEADLINE_S = 120.0
GREEDY = Sampling(n=1, max_tokens=24, temperature=0.0)
ROLLOUT = RolloutConfig(max_new_tokens=64, group_size=4, threads=1, dtype="float32", start_timeout_s=300)


def make_engine(folder: Path) -> VllmEngine:
    return VllmEngine(str(folder), ROLLOUT, 64, 0, "shared_memory")


def below() -> set[int]:
    """Processes of ours; multiprocessing's resource tracker stays until we end."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends just now
            found |= {child.pid} if "resource_tracker" not in " ".join(child.cmdline()) else set()
    return found


def expected_log_probs(seed: int, tokens: list[int], temperature: float = 1.0) -> Float32Array:
    """`[T-1]` from transformers."""
    with torch.inference_mode():
        logits = tiny_llama(seed)(torch.tensor([tokens])).logits[0, :-1] / temperature
    picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])
    numbers: Float32Array = picked[:, 0].numpy()
    return numbers


async def fingerprint(engine: VllmEngine) -> tuple[list[int], Float32Array]:
    """What tells weights apart: a greedy answer and the score of the prompt."""
    group = await engine.generate(f"f{id(object())}", PROMPT, GREEDY)
    return group[0].token_ids.tolist(), await engine.score(PROMPT)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    engine = make_engine(make_tiny_model(tmp_path_factory.mktemp("model"), 0))
    await engine.start()
    yield engine
    await engine.shutdown()


class Complaints(logging.Handler):
    """What vLLM logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def late(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same call in a thread that the system lets wait, as on a busy machine."""

    def waited(argument: Any) -> None:
        time.sleep(0.3)
        call(argument)

    return waited


@dataclass
class Fresh:
    tokens: list[int]
    scores: Float32Array
    left_over: set[int]
    complaints: list[str]
    after: Exception


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """A second engine that was started from the weights of seed 2, asked, and ended."""
    from vllm.v1.engine import async_llm

    before = below()
    engine = make_engine(make_tiny_model(tmp_path_factory.mktemp("fresh"), 2))
    await engine.start()
    tokens, scores = await fingerprint(engine)
    complaints = Complaints()
    logging.getLogger("vllm").addHandler(complaints)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "cancel_task_threadsafe", late(async_llm.cancel_task_threadsafe))
        await engine.shutdown()
    with pytest.raises(EngineError) as caught:
        await engine.generate("late", PROMPT, GREEDY)
    logging.getLogger("vllm").removeHandler(complaints)
    return Fresh(tokens, scores, below() - before, complaints.texts, caught.value)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_those_of_transformers(engine: VllmEngine, temperature: float) -> None:
    group = await engine.generate("l", PROMPT, Sampling(n=4, max_tokens=24, temperature=temperature))
    for sample in group:
        expected = expected_log_probs(0, [*PROMPT.tolist(), *sample.token_ids.tolist()], temperature)
        np.testing.assert_allclose(sample.log_probs, expected[len(PROMPT) - 1 :], atol=1e-3)


async def test_score_is_that_of_transformers(engine: VllmEngine) -> None:
    np.testing.assert_allclose(await engine.score(PROMPT), expected_log_probs(0, PROMPT.tolist()), atol=1e-3)


async def test_a_stop_string_ends_a_sample(engine: VllmEngine) -> None:
    free = await engine.generate("u", PROMPT, GREEDY)
    word = f"w{free[0].token_ids[3]}"
    stopped = await engine.generate("v", PROMPT, Sampling(n=1, max_tokens=24, temperature=0.0, stop=(word,)))
    assert (stopped[0].finish_reason, free[0].finish_reason) == ("stop", "length")
    assert stopped[0].token_ids.tolist() == free[0].token_ids[: len(stopped[0].token_ids)].tolist()
    assert len(stopped[0].token_ids) <= 4


async def test_a_stop_string_that_an_abort_cuts_in_two_ends_a_sample_all_the_same(
    engine: VllmEngine, tmp_path: Path
) -> None:
    [free] = await engine.generate("free", PROMPT, GREEDY)
    tokens = free.token_ids.tolist()
    start = max((place for place, token in enumerate(tokens) if token < 3), default=-1) + 1  # special ones have no text
    stop = " ".join(f"w{token}" for token in tokens[start:22])  # most cuts fall into it
    for attempt in range(5):
        sampling = Sampling(n=1, max_tokens=24, temperature=0.0, stop=(stop,))
        task = asyncio.create_task(engine.generate(f"two-{attempt}", PROMPT, sampling))
        await asyncio.sleep(0.02 * (attempt + 1))
        await engine.update_weights(write_weights(tmp_path / f"{attempt}.safetensors", 0, 0), "abort")
        [sample] = await task
        assert (sample.finish_reason, sample.token_ids.tolist()) == ("stop", tokens[:22])


async def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"120 prompt tokens and 24 new ones exceed .* 129 tokens"):
        await engine.generate("p", np.full(120, 3, np.int32), GREEDY)


async def test_a_request_id_in_flight_is_refused(engine: VllmEngine) -> None:
    task = asyncio.create_task(engine.generate("d", PROMPT, GREEDY))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="request d is in flight already"):
        await engine.generate("d", PROMPT, GREEDY)
    await task


FAULTS: list[tuple[dict[str, str], str]] = [
    ({"drop": "model.layers.1.mlp.up_proj.weight"}, r"1 missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
    ({"rename": "model.norm.weight"}, r"1 unknown \(renamed\)"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
async def test_wrong_weights_are_refused_by_name_and_change_nothing(
    engine: VllmEngine, tmp_path: Path, fault: Any, message: str
) -> None:
    tokens, scores = await fingerprint(engine)
    with pytest.raises(SyncError, match=message):
        await engine.update_weights(write_weights(tmp_path / "w.safetensors", 1, 1, **fault), "keep")
    assert await engine.version() == 0
    after = await fingerprint(engine)
    assert after[0] == tokens
    np.testing.assert_array_equal(after[1], scores)


async def test_a_file_that_was_cut_short_is_refused(engine: VllmEngine, tmp_path: Path) -> None:
    update = write_weights(tmp_path / "w.safetensors", 1, 1)
    with (tmp_path / "w.safetensors").open("r+b") as file:
        file.truncate(update.nbytes - 100)
    with pytest.raises(SyncError, match=f"announced with {update.nbytes}"):
        await engine.update_weights(update, "keep")
    assert (await engine.generate("still", PROMPT, GREEDY))[0].versions[0].version == 0


async def test_two_updates_later_it_is_a_fresh_engine_with_those_weights(
    engine: VllmEngine, tmp_path: Path, fresh: Fresh
) -> None:
    for seed in (1, 2):
        await engine.update_weights(write_weights(tmp_path / f"{seed}.safetensors", seed, seed), "keep")
        (tmp_path / f"{seed}.safetensors").unlink()
        np.testing.assert_allclose(await engine.score(PROMPT), expected_log_probs(seed, PROMPT.tolist()), atol=1e-3)
    tokens, scores = await fingerprint(engine)
    assert tokens == fresh.tokens
    np.testing.assert_allclose(scores, fresh.scores, atol=1e-5)


class Stuck:
    """Stands for a vLLM that lives and answers nothing from `step` on."""

    errored = False

    def __init__(self, step: str) -> None:
        self.step = step

    async def pause_generation(self, **_: Any) -> None:
        await asyncio.sleep(60 if self.step == "load" else 0)
        raise RuntimeError("something else")

    async def resume_generation(self) -> None:
        await asyncio.sleep(60 if self.step == "resume" else 0)

    async def collective_rpc(self, method: str) -> list[int | None]:
        return [0]


@pytest.mark.parametrize("step", ["load", "resume"])
async def test_an_engine_that_does_not_load_or_resume_in_time_is_lost(tmp_path: Path, step: str) -> None:
    """So that another one takes its place, which needs no end of the run."""
    limits = {"load": DEADLINE_S, "resume": DEADLINE_S} | {step: 1.0}  # the steps that answer have time
    hasty = ROLLOUT.model_copy(update={"start_timeout_s": limits["load"]})
    engine = VllmEngine(str(tmp_path), hasty, 64, 0, "shared_memory", control_timeout_s=limits["resume"])
    engine._llm = Stuck(step)
    with pytest.raises(EngineLostError, match=rf"the engine did not {step}.* within 1 s"):
        await engine.update_weights(WeightUpdate(3, "nowhere", 1), "keep")


class Breaking(Stuck):
    """vLLM as an update sees it that fails; its workers then hold these versions."""

    def __init__(self, versions: list[int | None]) -> None:
        super().__init__("none")
        self.versions, self.resumed = versions, False

    async def pause_generation(self, **_: Any) -> None:
        raise RuntimeError("Call to collective_rpc method failed: no such file")

    async def collective_rpc(self, method: str) -> list[int | None]:
        assert method == "loaded_version"
        return self.versions

    async def resume_generation(self) -> None:
        self.resumed = True


async def test_an_engine_goes_on_after_an_update_that_failed_unless_it_holds_two_versions(tmp_path: Path) -> None:
    for versions in ([0, 0], [0, None], [0, 3]):
        resumes = versions == [0, 0]
        engine = VllmEngine(str(tmp_path), ROLLOUT, 64, 0, "shared_memory")
        engine._llm = Breaking(versions)
        with pytest.raises(
            SyncError, match="could not load version 3: .* no such file" + ("$" if resumes else "; .* two versions")
        ):
            await engine.update_weights(WeightUpdate(3, "nowhere", 1), "keep")
        assert (engine._llm.resumed, engine._open.is_set()) == (resumes, resumes)


async def test_seeded_groups_that_do_not_fit_into_one_step_are_repeatable(engine: VllmEngine) -> None:
    """Twenty prompts of forty tokens, more than the tokens of a step; what is sampled depends on the seed alone."""

    async def group(uid: int) -> list[list[int]]:
        sampling = Sampling(n=2, max_tokens=4, temperature=1.0, seed=uid)
        return [s.token_ids.tolist() for s in await engine.generate(f"{uid}-{id(sampling)}", PROMPT + uid, sampling)]

    at_once = await asyncio.gather(*(group(uid) for uid in range(20)))
    assert await group(7) == at_once[7]


async def arriving_during(engine: VllmEngine, update: WeightUpdate, mode: PauseMode) -> Completion:
    """The answer to the prompt, asked while an update pauses something longer."""
    longer = Sampling(n=1, max_tokens=60, temperature=1.0)
    running = asyncio.create_task(engine.generate(f"running {mode}", PROMPT + 1, longer))
    await asyncio.sleep(0.1)
    updating = asyncio.create_task(engine.update_weights(update, mode))
    for _ in range(5):  # it has begun then
        await asyncio.sleep(0)
    [sample] = await engine.generate(f"arriving {mode}", PROMPT, GREEDY)
    await asyncio.gather(running, updating)
    return sample


def mixed_in(sample: Completion, version: int) -> float:
    """How far the log-probs of an answer to the prompt are from those that its version alone would give."""
    assert [span.version for span in sample.versions] == [version]
    exact = expected_log_probs(version, [*PROMPT.tolist(), *sample.token_ids.tolist()])[len(PROMPT) - 1 :]
    return float(np.abs(sample.log_probs - exact).max())


async def waiting_during(engine: VllmEngine, folder: Path, first: int, mode: PauseMode) -> tuple[int, Completion]:
    """The answer to the prompt, asked while the engine's width is taken when an update pauses it; with its version.

    That is the update's, in mode `wait` too, where only what has a token finishes first.
    """
    for version in range(first, first + 50):  # a busy machine may let us go on when the engine is done
        longer = Sampling(n=ROLLOUT.group_size, max_tokens=80, temperature=1.0)
        running = asyncio.create_task(engine.generate(f"running {version}", PROMPT, longer))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(engine.generate(f"waiting {version}", PROMPT, GREEDY))
        await asyncio.sleep(0.05)
        await engine.update_weights(write_weights(folder / f"{version}.safetensors", version, version), mode)
        group, [sample] = await asyncio.gather(running, waiting)
        if sample.versions[0].version == version > group[0].versions[0].version:
            return version, sample
    raise AssertionError("nothing waited")


@pytest.mark.parametrize("kept", [False, True])
async def test_prompts_meet_kv_of_older_weights_only_where_asked(tmp_path: Path, kept: bool) -> None:
    """The first block of the prompt is in the cache; what is sampled after it tells whose it is."""
    model = make_tiny_model(tmp_path, 0)
    narrow = ROLLOUT.model_copy(update={"concurrent_samples_per_replica": 1})
    engine = VllmEngine(str(model), narrow, 64, 0, "shared_memory", keep_prefix_cache=kept)
    await engine.start()
    modes: list[PauseMode] = ["abort", "keep", "wait"]
    try:
        await engine.generate("before", PROMPT, GREEDY)
        for version, mode in enumerate(modes, 1):
            update = write_weights(tmp_path / f"{version}.safetensors", version, version)
            sample = await arriving_during(engine, update, mode)
            np.testing.assert_allclose(
                await engine.score(PROMPT), expected_log_probs(version, PROMPT.tolist()), atol=1e-3
            )
            assert (mixed_in(sample, version) > 0.01) == kept
        version = len(modes)
        for mode in modes[1:]:
            version, sample = await waiting_during(engine, tmp_path, version + 1, mode)
            assert (mixed_in(sample, version) > 0.01) == kept
    finally:
        await engine.shutdown()


async def test_after_an_abort_every_token_has_the_log_prob_of_the_version_that_sampled_it(
    engine: VllmEngine, tmp_path: Path
) -> None:
    for attempt in range(50):
        version = 10 + attempt  # also the seed of its weights
        await engine.update_weights(write_weights(tmp_path / "a.safetensors", version, version), "keep")
        task = asyncio.create_task(
            engine.generate(f"cut-{attempt}", PROMPT, Sampling(n=4, max_tokens=64, temperature=1.0))
        )
        await asyncio.sleep(0.002 * 1.3 ** (attempt % 20))  # 2 to 290 ms: one of them falls into the generation
        await engine.update_weights(write_weights(tmp_path / "b.safetensors", version + 1, version + 1), "abort")
        group = await task
        for sample in group:
            tokens = [*PROMPT.tolist(), *sample.token_ids.tolist()]
            assert len(sample.token_ids) == 64
            for span in sample.versions:
                expected = expected_log_probs(span.version, tokens)[len(PROMPT) - 1 :][span.start : span.end]
                np.testing.assert_allclose(sample.log_probs[span.start : span.end], expected, atol=2e-3)
        if any(len(sample.versions) == 2 for sample in group):
            return
    raise AssertionError("no sample was cut")


def with_kept_kv(tokens: list[int], sample: Completion) -> Float32Array:
    """`[T]` from transformers, of an answer during which weights came and all KV computed before them stayed."""
    from transformers import DynamicCache

    cache, found, done = DynamicCache(), [], 0
    for span in sample.versions:
        stop = len(PROMPT) + span.end - 1  # the token before the first of a version is what that version reads first
        with torch.inference_mode():
            given, places = torch.tensor([tokens[done:stop]]), torch.arange(done, stop)[None]
            logits = tiny_llama(span.version)(given, past_key_values=cache, position_ids=places).logits[0]
        sampled = torch.tensor(tokens[done + 1 : stop + 1])[:, None]
        found.append(torch.log_softmax(logits, -1).gather(1, sampled)[-(span.end - span.start) :, 0])
        done = stop
    return torch.cat(found).numpy()


async def test_what_keeps_its_kv_has_the_log_probs_and_the_label_of_the_version_that_sampled_each_token(
    engine: VllmEngine, tmp_path: Path
) -> None:
    version = 100
    for attempt in range(50):  # a busy machine may let us go on when the engine is done
        version += 1
        await engine.update_weights(write_weights(tmp_path / "a.safetensors", version, version), "keep")
        sampling = Sampling(n=4, max_tokens=64, temperature=1.0)
        task = asyncio.create_task(engine.generate(f"kept-{attempt}", PROMPT, sampling))
        for _ in range(3):
            await asyncio.sleep(0.05)
            version += 1
            await engine.update_weights(write_weights(tmp_path / "b.safetensors", version, version), "keep")
        group = await task
        for sample in group:
            expected = with_kept_kv([*PROMPT.tolist(), *sample.token_ids.tolist()], sample)
            np.testing.assert_allclose(sample.log_probs, expected, atol=2e-3)
        if any(len(sample.versions) > 1 for sample in group):
            return
    raise AssertionError("no sample met an update")


async def test_what_waits_in_vllm_is_served_by_age_and_a_score_before_all(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication waits for the score, and what an update ends is submitted again."""
    from vllm.v1.engine.async_llm import AsyncLLM

    places: dict[str, set[int]] = {}
    generate = AsyncLLM.generate

    def noting(llm: AsyncLLM, prompt: Any, parameters: Any, request_id: str, *, priority: int) -> Any:
        places.setdefault(request_id.replace("-", "/").partition("/")[0], set()).add(priority)
        return generate(llm, prompt, parameters, request_id, priority=priority)

    monkeypatch.setattr(AsyncLLM, "generate", noting)
    tasks = [asyncio.create_task(engine.generate(name, PROMPT, GREEDY)) for name in ["older", "younger"]]
    await asyncio.sleep(0.02)
    version = await engine.version() + 1
    await engine.update_weights(write_weights(tmp_path / "w.safetensors", version, version), "abort")
    urgent = Sampling(n=1, max_tokens=4, temperature=0.0, priority=-1)
    await asyncio.gather(engine.score(PROMPT), engine.generate("urgent", PROMPT, urgent), *tasks)
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(places, 1)
    assert sorted(places, key=lambda name: min(places[name])) == ["score", "urgent", "older", "younger"]


async def test_waiting_lets_finish_also_what_vllm_sets_aside_for_want_of_kv(tmp_path: Path) -> None:
    """Memory for 14 blocks of 32 tokens; the eight samples have 4 blocks each in the end."""
    memory = {"cpu_kv_cache_gib": 14 * 32 * 1024 / GIB}
    rollout = ROLLOUT.model_copy(update={"concurrent_samples_per_replica": 2, **memory})
    engine = VllmEngine(str(make_tiny_model(tmp_path, 0)), rollout, 64, 0, "shared_memory")
    await engine.start()
    try:
        sampling = Sampling(n=4, max_tokens=80, temperature=1.0)
        tasks = [asyncio.create_task(engine.generate(f"{n}", PROMPT + n, sampling)) for n in range(2)]
        await asyncio.sleep(0.1)
        await engine.update_weights(write_weights(tmp_path / "w.safetensors", 1, 1), "wait")
        for sample in [sample for group in await asyncio.gather(*tasks) for sample in group]:
            assert [(span.start, span.end) for span in sample.versions] == [(0, 80)]
    finally:
        await engine.shutdown()


async def test_shutdown_leaves_no_process(fresh: Fresh) -> None:
    assert fresh.left_over == set()


async def test_shutdown_is_no_failure_in_the_log(fresh: Fresh) -> None:
    assert fresh.complaints == []


async def test_nothing_is_generated_after_shutdown(fresh: Fresh) -> None:
    assert "the engine is not running" in str(fresh.after)


async def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    rollout = RolloutConfig(max_new_tokens=CONTEXT, dtype="float32")
    engine = VllmEngine(str(make_tiny_model(tmp_path, 0)), rollout, 64, 0, "shared_memory")
    with pytest.raises(ConfigError, match=f"at most the {CONTEXT} tokens"):
        await engine.start()


async def test_z_a_killed_engine_fails_what_is_in_flight_and_what_follows(engine: VllmEngine, tmp_path: Path) -> None:
    """The last test of the file, because the shared engine does not survive it."""
    core = [psutil.Process(pid) for pid in below()]
    for process in core:
        process.suspend()  # so that the update waits for an answer when its end comes
    sampling = Sampling(n=4, max_tokens=64, temperature=1.0)
    update = write_weights(tmp_path / "w.safetensors", 9, 9)
    generation = asyncio.create_task(engine.generate("k", PROMPT, sampling))
    await asyncio.sleep(0.1)
    publication = asyncio.create_task(engine.update_weights(update, "keep"))
    await asyncio.sleep(0.1)
    assert not generation.done()
    assert not publication.done()
    for process in core:
        process.kill()
    died = "the engine for .* died: its process EngineCore.* was killed by SIGKILL"
    with pytest.raises(EngineCrashedError, match=f"request k: {died}"):
        await asyncio.wait_for(generation, DEADLINE_S)
    with pytest.raises(EngineError, match=f"update to version 9: {died}"):
        await asyncio.wait_for(publication, DEADLINE_S)
    with pytest.raises(EngineLostError, match=f"request late: {died}") as late:
        await asyncio.wait_for(engine.generate("late", PROMPT, GREEDY), DEADLINE_S)
    assert not isinstance(late.value, EngineCrashedError)  # it was dead before
    with pytest.raises(EngineError, match=f"update to version 10: {died}"):
        await asyncio.wait_for(engine.update_weights(WeightUpdate(10, "nowhere", 1), "keep"), DEADLINE_S)
