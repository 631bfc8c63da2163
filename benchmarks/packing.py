"""What packing saves: one optimizer step on packed groups, compared with the same step row by row.

    python benchmarks/packing.py --model FOLDER [--json PATH]

Without --model, the model is a small random Llama. Rows of `--json`: name, unit, ours, other, ratio (other over ours).
Both sides run the same code on the same groups. Row by row means that every response is a row with its own prompt.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tidemill.config.algorithm import AlgorithmConfig
from tidemill.config.trainer import TrainerConfig
from tidemill.records import Group, Prompt, Rollout, VersionSpan
from tidemill.train.batch import MicroBatch, micro_batches, stacks, step_denominator
from tidemill.train.packing import pack_group
from tidemill.train.policy import PolicyRank

Row = dict[str, str | float]


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args, args.model or random_llama(Path(folder)))
    print(f"{'':24}{'packed':>12}{'row by row':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['name'] + ', ' + row['unit']:24}{row['ours']:12.2f}{row['other']:12.2f}{row['ratio']:8.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=44)
    parser.add_argument("--shared-tokens", type=int, default=26, help="common prefix of all prompts")
    parser.add_argument("--response-tokens", type=int, default=12, help="largest length; the smallest is half of it")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, model: Path) -> list[Row]:
    """One step each, after a warm-up step."""
    trainer = TrainerConfig(steps=3, threads=args.threads, learning_rate=1e-9)
    rank = PolicyRank(str(model), trainer, AlgorithmConfig(), temperature=1.0, seed=0)
    groups = make_groups(args, vocabulary=rank.model.config.vocab_size)
    packed, plain = (batches(groups, args.micro_batch_tokens, side) for side in (True, False))
    denominator = step_denominator(groups, "token")
    rank.update(packed, denominator)
    ours, other = (timed_update(rank, part, denominator) for part in (packed, plain))
    return [
        table_row("step", "s", ours, other),
        table_row("columns", "tokens", columns(packed), columns(plain)),
        table_row("positions", "to head", predictors(packed), predictors(plain)),
    ]


def table_row(name: str, unit: str, ours: float, other: float) -> Row:
    return {"name": name, "unit": unit, "ours": ours, "other": other, "ratio": other / ours}


def timed_update(rank: PolicyRank, batches: Sequence[MicroBatch], denominator: float) -> float:
    start = time.perf_counter()
    rank.update(batches, denominator)
    return time.perf_counter() - start


def columns(batches: Sequence[MicroBatch]) -> float:
    return float(sum(batch.token_ids.size for batch in batches))


def predictors(batches: Sequence[MicroBatch]) -> float:
    return float(sum(len(batch.predictors()[0]) for batch in batches))


def batches(groups: Sequence[Group], max_tokens: int, packed: bool) -> list[MicroBatch]:
    """Micro-batches of packed groups, or of single responses."""
    if packed:
        rows = [row for group in groups for row in pack_group(group, signs(group), max_tokens)]
        return micro_batches(rows, max_tokens, ranks=1)[0]
    single = [Group(group.prompt, (rollout,)) for group in groups for rollout in group.rollouts]
    rows = [row for group in single for row in pack_group(group, signs(group), max_tokens)]
    return [MicroBatch.of(stack) for stack in stacks(sorted(rows, key=len, reverse=True), max_tokens)]


def signs(group: Group) -> list[np.ndarray]:
    return [np.full(len(r.token_ids), 1 if r.reward > 0 else -1, np.float32) for r in group.rollouts]


def make_groups(args: argparse.Namespace, vocabulary: int) -> list[Group]:
    """Random tokens: the responses of a group share their prompt and hardly anything else."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocabulary, args.shared_tokens)
    groups = []
    for uid in range(args.groups):
        own = rng.integers(3, vocabulary, args.prompt_tokens - args.shared_tokens)
        prompt = Prompt(uid, uid, np.concatenate([shared, own]).astype(np.int32), "")
        rollouts = (make_rollout(rng, args.response_tokens, vocabulary, float(i % 2)) for i in range(args.group_size))
        groups.append(Group(prompt, tuple(rollouts)))
    return groups


def make_rollout(rng: np.random.Generator, longest: int, vocabulary: int, reward: float) -> Rollout:
    length = int(rng.integers(longest // 2, longest + 1))
    return Rollout(
        token_ids=rng.integers(3, vocabulary, length).astype(np.int32),
        log_probs=np.full(length, -np.log(vocabulary), np.float32),
        loss_mask=np.ones(length, np.float32),
        versions=(VersionSpan(0, 0, length),),
        finish_reason="stop",
        text="",
        reward=reward,
        reward_parts={},
        seconds=0.0,
    )


def random_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
