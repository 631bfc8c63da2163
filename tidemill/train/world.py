"""The ranks of a trainer, as one of them sees them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """Who takes part; with one rank nothing is exchanged.

    Attributes:
        rank: this one.
        size: ranks in all.
        init_method: where ranks meet, `tcp://host:port`; needed when there are several.
    """

    rank: int = 0
    size: int = 1
    init_method: str | None = None

    @property
    def device(self) -> torch.device:
        """A GPU if there is one; ranks of one process space take one each."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.rank % torch.cuda.device_count())
        return torch.device("cpu")

    def join(self, timeout_s: float) -> None:
        """Meet the other ranks; `timeout_s` bounds this and every exchange."""
        if self.size > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                init_method=self.init_method,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )

    def leave(self) -> None:
        """Part from the other ranks."""
        if self.size > 1:
            dist.destroy_process_group()

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or what `operation` says) over ranks, in place if it is where the ranks compute."""
        if self.size > 1:
            dist.all_reduce(tensor := tensor.to(self.device), operation)
        return tensor
