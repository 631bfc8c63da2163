"""A safetensors file, written tensor by tensor, so that tensors which are spread over ranks are whole one at a time.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 little-endian bytes, the header as
JSON of `{name: {dtype, shape, data_offsets}}`, padded with spaces to a multiple of 8, then the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tidemill.train.sharding import full_tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
ALIGNMENT = 8


@torch.no_grad()
def write_tensors(path: Path | None, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> int:
    """Write one safetensors file, whole or not at all; returns its bytes.

    Args:
        path: of the file; None on a rank that only helps to make tensors whole. All ranks call this at once.
        tensors: whole, or spread over the ranks.
        dtype: of all tensors in the file; None keeps each one's own.
    """
    if path is None:
        for tensor in tensors.values():
            full_tensor(tensor.to(dtype or tensor.dtype))
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(header(tensors, dtype))
            for tensor in tensors.values():
                file.write(payload(full_tensor(tensor.to(dtype or tensor.dtype))))
        nbytes = partial.stat().st_size
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return nbytes


def header(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> bytes:
    """What stands before the tensors."""
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        stored = dtype or tensor.dtype
        stop = start + tensor.numel() * stored.itemsize
        tree[name] = {"dtype": DTYPES[stored], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def payload(tensor: Tensor) -> memoryview:
    """The bytes of a whole tensor."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
