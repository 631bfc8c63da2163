from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from train_rig import batches_of, make_rank, random_advantages, random_groups, save_llama

from tidemill.errors import CheckpointError
from tidemill.train.policy import PolicyRank


def train(rank: PolicyRank, steps: range) -> list[dict[str, float]]:
    """The batch of a step depends on its number only; times are left out."""
    results = []
    for step in steps:
        groups = random_groups(2, seed=step)
        (batches,) = batches_of(groups, random_advantages(groups, seed=step), 60)
        results.append({k: v for k, v in rank.update(batches, 20.0).items() if not k.startswith("time/")})
    return results


def test_resumed_training_equals_uninterrupted_training_bit_by_bit(llama: Path, tmp_path: Path) -> None:
    whole = make_rank(llama, warmup_steps=3)
    expected = train(whole, range(5))
    stopped = make_rank(llama, warmup_steps=3)
    assert train(stopped, range(2)) == expected[:2]
    stopped.save_state(tmp_path)
    drawn = torch.rand(3)
    resumed = make_rank(llama, warmup_steps=3)
    resumed.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert train(resumed, range(2, 5)) == expected[2:]
    assert all(torch.equal(whole.parameters[name], resumed.parameters[name]) for name in whole.parameters)


def test_state_before_the_first_update_can_be_saved(llama: Path, tmp_path: Path) -> None:
    make_rank(llama).save_state(tmp_path)
    rank = make_rank(llama)
    rank.load_state(tmp_path)
    assert train(rank, range(1)) == train(make_rank(llama), range(1))


def test_state_is_safetensors_and_json_only(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama)
    train(rank, range(1))
    rank.save_state(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer.json", "trainer.safetensors"]
    assert json.loads((tmp_path / "trainer.json").read_text()) == {"updates": 1}


@pytest.mark.parametrize("options", [{"hidden_size": 32}, {"tied": False}])
def test_the_state_of_another_model_is_refused_and_changes_nothing(
    llama: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    make_rank(save_llama(tmp_path / "other", **options)).save_state(tmp_path / "state")
    rank = make_rank(llama)
    before = rank.score(np.arange(3, 9, dtype=np.int32))
    with pytest.raises(CheckpointError, match="another model"):
        rank.load_state(tmp_path / "state")
    np.testing.assert_array_equal(rank.score(np.arange(3, 9, dtype=np.int32)), before)


def test_a_missing_or_broken_state_is_refused(llama: Path, tmp_path: Path) -> None:
    rank = make_rank(llama)
    with pytest.raises(CheckpointError, match="not a readable trainer state"):
        rank.load_state(tmp_path)
    rank.save_state(tmp_path)
    tensors = tmp_path / "trainer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a readable trainer state"):
        rank.load_state(tmp_path)
