"""Counts the bytes copied from given tensors, by intercepting every operation of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COPYING = {torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class Copies(TorchDispatchMode):
    """Within the context, `nbytes` grows by every copy of one of the tensors; casts do not count."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.watched, self.nbytes = {local(tensor).data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        result = func(*args, **(kwargs or {}))
        if func in COPYING and local(source).data_ptr() in self.watched and result.dtype == source.dtype:
            self.nbytes += local(source).nbytes
        return result


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank stores."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
