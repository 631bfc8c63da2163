"""The ranks of a trainer, and a network whose parameters are sharded over them (FSDP2).

                rank 0   rank 1
    weight      rows     rows       float32, with gradient and optimizer state: each rank stores and updates its rows
      │ all-gather└───┬────┘
      ▼               ▼             one layer at a time, during a forward or backward pass, in the dtype of the
    whole layer, on every rank      matrix products
      │ reduce-scatter (sum)
      ▼
    gradient    rows     rows       float32

All-gather and reduce-scatter need every rank, so all ranks run the same passes in the same order. A single rank is not
sharded: its parameters are plain tensors, which `full_tensor`, `local_rows` and `shard_like` pass through.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class World:
    """The data-parallel ranks, as one of them sees them; a single rank communicates with nobody."""

    rank: int = 0  # of this process
    size: int = 1  # number of ranks
    init_method: str | None = None  # where the ranks meet, `tcp://host:port`; required if there are several

    @property
    def device(self) -> torch.device:
        """A GPU of this process if it sees any, else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.rank % torch.cuda.device_count())
        return torch.device("cpu")

    def init_process_group(self, timeout_s: float) -> None:
        """Connect to the other ranks; `timeout_s` bounds this call and every later collective."""
        if self.size > 1:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=self.init_method,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )

    def destroy_process_group(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The tensor reduced over all ranks; in place if it is on `device` already."""
        if self.size > 1:
            dist.all_reduce(tensor := tensor.to(self.device), operation)
        return tensor


def shard_model(network: nn.Module, world: World, dtype: torch.dtype) -> None:
    """Keep only this rank's rows of every parameter, with the values of rank 0.

    The other ranks may pass a network on the `meta` device. No rank but the first ever holds more than its rows and one
    layer. `World.init_process_group` must be called before.

    Gradients are summed over the ranks, not averaged, because a loss is divided by the denominator of the whole step.
    As under autocast, the weights of matrix products are gathered in `dtype`; the residual stream, norms, embedding and
    head stay in float32, and gradients are summed in float32.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    layers, values = transformer_layers(network), RankZeroValues(network, world)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    products = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    if dtype != torch.float32:
        vectors = [norm for layer in layers for norm in norms(layer)]
        values.broadcast(vectors)
        fully_shard(vectors, mesh=mesh, mp_policy=exact)
    for layer in layers:
        values.broadcast([layer])
        fully_shard(layer, mesh=mesh, mp_policy=products)
    values.broadcast([network])
    # The root reshards after its forward pass too; otherwise the next pass would use values from before the update.
    fully_shard(network, mesh=mesh, mp_policy=exact, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def transformer_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of a model: the module list with the most parameters."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda modules: sum(p.numel() for p in modules.parameters()), default=[]))


def norms(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer whose own parameters are all vectors: they multiply no matrices."""
    for module in layer.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.ndim == 1 for parameter in own):
            yield module


class RankZeroValues:
    """Parameters and buffers of a network whose values only rank 0 has loaded.

    So a machine with many ranks holds the whole model once, not once per rank. Buffers are included, because those that
    are not in a state dict (rotary frequencies) have no values on the `meta` device either.
    """

    def __init__(self, network: nn.Module, world: World) -> None:
        self.world = world
        self.owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # a tied parameter has several
        for module in network.modules():
            for name, tensor in own_tensors(module):
                self.owners[id(tensor)].append((module, name))

    @torch.no_grad()
    def broadcast(self, modules: Iterable[nn.Module]) -> None:
        """Send everything in these modules that has not been sent yet; all ranks pass the same modules at once."""
        for tensor in [tensor for root in modules for module in root.modules() for _, tensor in own_tensors(module)]:
            if owners := self.owners.pop(id(tensor), None):
                value = self.received(tensor)
                for module, name in owners:
                    setattr(module, name, value)

    def received(self, tensor: Tensor) -> Tensor:
        device = self.world.device
        if self.world.rank == 0:
            value = tensor.detach().to(device).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        dist.broadcast(value, src=0)
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor; if it is sharded, all ranks call this at once and each receives all rows."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> slice:
    """The rows of a tensor that this rank stores: FSDP cuts the first dimension as `torch.chunk` does."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    rows, rank = math.ceil(tensor.shape[0] / tensor.device_mesh.size()), tensor.device_mesh.get_local_rank()
    return slice(min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0]))


def shard_like(rows: Tensor, like: Tensor) -> Tensor:
    """The tensor, sharded as `like`, of which this rank stores `rows`; nothing is communicated."""
    rows = rows.to(like.device)
    if not isinstance(like, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
