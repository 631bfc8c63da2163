"""The parameters of a network, spread over the ranks (FSDP2).

                rank 0   rank 1
    weight      rows     rows       float32, with its gradient and its moments: every rank keeps and updates its own
      │ gather    └───┬────┘
      ▼               ▼             layer by layer, while a forward or backward pass is there; in the dtype of the
    whole layer, on every rank      matrix products
      │ scatter, summed
      ▼
    gradient    rows     rows       float32

A gather or scatter needs all ranks, so all of them run the same passes in the same order. With one rank nothing is
spread and nothing here is called but `WholeParameter` and what passes plain tensors through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tidemill.train.network import Network
from tidemill.train.values import Values
from tidemill.train.world import World


def spread(network: Network, world: World) -> None:
    """Keep of every parameter the rows of this rank only; `World.join` comes before.

    The values are those of rank 0; of the others' network the shapes are enough. No rank but the first ever holds more
    than its rows and one layer.

    A gradient is summed over the ranks, not averaged: the loss has the denominator of the whole step already.

    As under autocast, weights of matrix products are gathered in the network's dtype, and the residual stream, norms,
    embedding and head stay in float32; gradients are summed in float32.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    layers, values = blocks(network), Values(network, world)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    products = MixedPrecisionPolicy(network.dtype, torch.float32, cast_forward_inputs=False)
    if network.dtype != torch.float32:
        vectors = [norm for layer in layers for norm in norms(layer)]
        values.hand_out(vectors)
        fully_shard(vectors, mesh=mesh, mp_policy=exact)
    for layer in layers:
        values.hand_out([layer])
        fully_shard(layer, mesh=mesh, mp_policy=products)
    values.hand_out([network])
    # The root frees its part after the forward pass too, so that no pass computes with what an optimizer step replaced.
    fully_shard(network, mesh=mesh, mp_policy=exact, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def blocks(network: nn.Module) -> list[nn.Module]:
    """The layers of a model: the list of modules that has most of its parameters."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda modules: sum(p.numel() for p in modules.parameters()), default=[]))


def norms(layer: nn.Module) -> Iterator[nn.Module]:
    """Modules of a layer that multiply no matrices: those with vectors of their own only."""
    for module in layer.modules():
        own = list(module.parameters(recurse=False))
        if own and all(parameter.ndim == 1 for parameter in own):
            yield module


def whole(tensor: Tensor) -> Tensor:
    """All rows of a tensor that may be spread; every rank gets them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kept_rows(tensor: Tensor) -> slice:
    """Which rows of a tensor that may be spread this rank keeps."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def spread_as(rows: Tensor, like: Tensor) -> Tensor:
    """The tensor that is spread as `like` is, of which this rank keeps these rows; nothing is exchanged."""
    if not isinstance(like, DTensor):
        return rows.to(like.device)
    return DTensor.from_local(
        rows.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


class Place(Protocol):
    """Where a rank keeps a parameter, or its rows of it; `tensor` can be replaced by another one of the same shape."""

    tensor: Tensor


class WholeParameter:
    """A parameter that this rank has to itself."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    @property
    def tensor(self) -> Tensor:
        """The parameter's data."""
        return self.parameter.data

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        self.parameter.data = tensor


class Rows:
    """The rows of a parameter that this rank keeps, padded so that all ranks have as many.

    FSDP2 gathers from a flat view of the padded rows, and the optimizer updates the rows through the parameter: both
    are views of `tensor`, and assigning to the parameter's `data` would change neither.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # torch's FSDPParam

    @property
    def tensor(self) -> Tensor:
        """`[N]`, flat and padded."""
        rows: Tensor = self.owner._sharded_param_data
        return rows

    @tensor.setter
    def tensor(self, tensor: Tensor) -> None:
        local = self.owner.sharded_param._local_tensor
        self.owner._sharded_param_data = tensor
        self.owner.sharded_param._local_tensor = tensor[: local.numel()].view_as(local)


def places(network: nn.Module) -> Mapping[str, Place]:
    """Where this rank keeps the parameters of a network, by any name of its own."""
    groups = [
        group
        for module in network.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    if not groups:
        return {name: WholeParameter(parameter) for name, parameter in network.named_parameters()}
    owners = {id(owner.sharded_param): owner for group in groups for owner in group.fsdp_params}
    return {name: Rows(owners[id(parameter)]) for name, parameter in network.named_parameters()}
