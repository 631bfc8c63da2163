"""What vLLM is told, and what is refused before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.config.rollout import RolloutConfig
from tidemill.errors import ConfigError
from tidemill.inference.engine_settings import context_length, engine_environment, engine_settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100}))
    return str(tmp_path)


def test_the_context_is_prompt_and_response_and_one_for_scoring(model: str) -> None:
    assert context_length(model, 60) == 61


def test_the_context_is_never_longer_than_the_models(model: str) -> None:
    assert context_length(model, 100) == 100


def test_a_context_that_the_model_does_not_have_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens = 101. Allowed: at most the 100 tokens"):
        context_length(model, 101)


def test_the_width_is_what_is_in_flight_and_bounded(model: str) -> None:
    narrow = RolloutConfig(concurrent_samples_per_replica=3, group_size=4, max_new_tokens=8)
    wide = RolloutConfig(concurrent_samples_per_replica=100, group_size=64, max_new_tokens=8)
    assert engine_settings(model, narrow, 8, "cpu")["max_num_seqs"] == 12
    assert engine_settings(model, wide, 8, "cpu")["max_num_seqs"] == 128


@pytest.mark.parametrize(("response", "step"), [(8, 512), (600, 608)])
def test_prompts_are_not_cut_on_the_cpu_and_the_longest_fits_a_step(tmp_path: Path, response: int, step: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 1000}))
    settings = engine_settings(str(tmp_path), RolloutConfig(max_new_tokens=response), 7, "cpu")
    assert (settings["enable_chunked_prefill"], settings["max_num_batched_tokens"]) == (False, step)
    assert settings["max_model_len"] <= step


def test_log_probs_are_of_the_tempered_distribution(model: str) -> None:
    assert engine_settings(model, RolloutConfig(max_new_tokens=8), 8, "cuda")["logprobs_mode"] == "processed_logprobs"


def test_threads_of_the_config_reach_the_environment() -> None:
    assert engine_environment(RolloutConfig(threads=3))["OMP_NUM_THREADS"] == "3"
