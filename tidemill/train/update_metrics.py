"""The metrics of an optimizer step, summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.config.training import AlgorithmConfig, OldLogProb
from tidemill.train.sharding import World

SUMS = ("loss", "tokens", "ratio", "clipped", "kl")
CORRECTION_SUMS: Mapping[OldLogProb, tuple[str, ...]] = {
    "rollout": (),
    "version_start": ("gap",),
    "decoupled": ("gap", "weight", "truncated"),
}
REFERENCE_SUMS = ("reference",)
# Sum over tokens: the name of its mean, and the value of that in a step without tokens.
MEANS = {
    "ratio": ("ratio/mean", 1.0),
    "clipped": ("ratio/clip_fraction", 0.0),
    "kl": ("kl/old_new", 0.0),
    "reference": ("kl/reference", 0.0),
    "gap": ("correction/old_rollout_gap", 0.0),
    "weight": ("correction/weight_mean", 1.0),
    "truncated": ("correction/truncated_ratio", 0.0),
}


class UpdateMetrics:
    """Running sums; every rank has the same ones, whatever its share of the tokens."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        reference = REFERENCE_SUMS if algorithm.kl_loss_coef else ()
        self.names = SUMS + CORRECTION_SUMS[algorithm.old_log_prob] + reference
        self.sums = torch.zeros(len(self.names), dtype=torch.float64)
        self.weight_max = torch.zeros(1, dtype=torch.float64)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: a scalar for each of `names`, and `weight_max` if tokens are weighted."""
        self.sums += torch.stack([values[name] for name in self.names]).double().cpu()
        if "weight" in self.names:
            self.weight_max = torch.maximum(self.weight_max, values["weight_max"].double().cpu())

    def all_reduce(self, world: World) -> None:
        self.sums = world.all_reduce(self.sums)
        if "weight" in self.names:
            self.weight_max = world.all_reduce(self.weight_max, dist.ReduceOp.MAX)

    @property
    def totals(self) -> dict[str, float]:
        return dict(zip(self.names, self.sums.tolist(), strict=True))

    def result(self) -> dict[str, float]:
        """`loss`, `tokens`, `skipped` (1 without tokens, else 0), and the means over tokens."""
        totals = self.totals
        tokens = totals["tokens"]
        means = {
            metric: totals[name] / tokens if tokens else without_tokens
            for name, (metric, without_tokens) in MEANS.items()
            if name in totals
        }
        if "weight" in totals:
            means["correction/weight_max"] = self.weight_max.item()  # 0 without tokens: below that of any other step
        return {"loss": totals["loss"], "tokens": tokens, "skipped": float(not tokens), **means}
