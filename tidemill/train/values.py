"""The values of a network that only rank 0 has loaded, handed to the other ranks a part at a time.

The others begin with shapes (tensors on torch's device `meta`), so that a machine of many ranks holds the whole model
once, and not once a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tidemill.train.world import World


class Values:
    """The parameters and buffers of a network that is the same on all ranks, but has values on rank 0 only."""

    def __init__(self, network: nn.Module, world: World) -> None:
        self.world = world
        self.places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # tied ones have several
        for module in network.modules():
            for name, tensor in own_tensors(module):
                self.places[id(tensor)].append((module, name))

    @torch.no_grad()
    def hand_out(self, modules: Iterable[nn.Module]) -> None:
        """Bring what modules hold, and was not handed out before, to where each rank computes.

        All ranks call this at once, with the same modules.
        """
        held = [tensor for root in modules for module in root.modules() for _, tensor in own_tensors(module)]
        for tensor in held:
            places = self.places.pop(id(tensor), ())
            if places:
                self.put(places, tensor)

    def put(self, places: Iterable[tuple[nn.Module, str]], tensor: Tensor) -> None:
        """Replace one tensor, wherever it stands, by rank 0's."""
        first, device = self.world.rank == 0, self.world.device
        value = tensor.detach().to(device) if first else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        value = value.contiguous()
        dist.broadcast(value, src=0)
        is_parameter = isinstance(tensor, nn.Parameter)
        replacement = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
        for module, name in places:
            (module._parameters if is_parameter else module._buffers)[name] = replacement  # type: ignore[assignment]


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module itself; a name that is set to None has none."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
