"""Tiny models and groups for tests of the trainer, and the plain computation that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.trainer import TrainerConfig
from tidemill.records import Float32Array, Group, Prompt, Rollout, VersionSpan
from tidemill.train.batch import MicroBatch, micro_batches
from tidemill.train.packing import pack_group
from tidemill.train.policy import PolicyRank
from tidemill.train.sharding import World

VOCABULARY = 97
TEMPERATURE = 0.7


def save_llama(
    folder: Path, *, tied: bool = True, hidden_size: int = 64, seed: int = 1, vocabulary: int = VOCABULARY
) -> Path:
    """Two layers, four heads over two key-value heads; weights are large enough for errors to be visible."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_rank(
    folder: Path,
    algorithm: AlgorithmConfig | None = None,
    *,
    world: World | None = None,
    steps_per_version: int = 1,
    **trainer: object,
) -> PolicyRank:
    """A float32 rank with a learning rate of 1e-2, so that an update changes the log-probs visibly."""
    settings = TrainerConfig.model_validate(
        {"steps": 8, "precision": "float32", "learning_rate": 1e-2, "threads": 1} | trainer
    )
    return PolicyRank(
        str(folder),
        settings,
        algorithm or AlgorithmConfig(),
        temperature=TEMPERATURE,
        seed=3,
        steps_per_version=steps_per_version,
        world=world,
    )


def make_rollout(token_ids: Sequence[int], mask: Sequence[float] | None = None, reward: float = 0.0) -> Rollout:
    """A rollout with old log-probs of -1, -1.1, -1.2, ..."""
    length = len(token_ids)
    return Rollout(
        token_ids=np.array(token_ids, np.int32),
        log_probs=(-1 - 0.1 * np.arange(length)).astype(np.float32),
        loss_mask=np.array(mask if mask is not None else np.ones(length), np.float32),
        versions=(VersionSpan(0, 0, length),),
        finish_reason="stop",
        text="",
        reward=reward,
        reward_parts={},
        seconds=0.0,
    )


def make_group(uid: int, prompt: Sequence[int], *rollouts: Rollout) -> Group:
    return Group(Prompt(uid, uid, np.array(prompt, np.int32), ""), rollouts)


def random_groups(count: int, seed: int = 0) -> list[Group]:
    """Groups of four with a common prefix and different lengths; a third of the response tokens is masked."""
    rng = np.random.default_rng(seed)
    groups = []
    for uid in range(count):
        rollouts = []
        for index in range(4):
            tokens = rng.integers(3, VOCABULARY, int(rng.integers(3, 9)))
            tokens[0] = rng.integers(3, 5)
            mask = rng.random(len(tokens)) > 1 / 3
            mask[-1] = index > 0
            rollouts.append(make_rollout(tokens.tolist(), mask.astype(float).tolist(), float(index % 2)))
        prompt = [90, 91, *rng.integers(3, VOCABULARY, int(rng.integers(1, 6))).tolist()]
        groups.append(make_group(uid, prompt, *rollouts))
    return groups


def random_advantages(groups: Sequence[Group], seed: int = 1) -> list[Float32Array]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(group.rollouts)).astype(np.float32) for group in groups]


def batches_of(
    groups: Sequence[Group], advantages: Sequence[Float32Array], max_tokens: int, ranks: int = 1, **options: Any
) -> list[list[MicroBatch]]:
    rows, first = [], 0
    for group, advantage in zip(groups, advantages, strict=True):
        rows += pack_group(group, spread(group, advantage), max_tokens, first=first, **options)
        first += len(group.rollouts)
    return micro_batches(rows, max_tokens, ranks)


def spread(group: Group, advantages: Sequence[float] | Float32Array) -> list[Float32Array]:
    """`[R]` for each rollout: its advantage at every token."""
    return [np.full(len(r.token_ids), a, np.float32) for r, a in zip(group.rollouts, advantages, strict=True)]


def plain_log_probs(model: torch.nn.Module, group: Group, rollout: Rollout, temperature: float = TEMPERATURE) -> Tensor:
    """`[R]` log-probs, by a forward pass of one sequence."""
    tokens = np.concatenate([group.prompt.token_ids, rollout.token_ids])
    ids = torch.from_numpy(tokens).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    scores = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
    return scores[len(group.prompt.token_ids) - 1 :]
