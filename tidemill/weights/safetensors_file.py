"""Safetensors files as bytes: the header, where each tensor lies, and which tensors a model has.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 little-endian bytes, the header as
JSON of `{name: {dtype, shape, data_offsets}}`, padded with spaces to a multiple of 8, then the tensors. Read here as
bytes because numpy has no bfloat16, and because a file must arrive byte for byte. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import SyncError
from tidemill.models.hf_config import weight_files
from tidemill.weights.delta import Bytes

Shapes = Mapping[str, tuple[int, ...]]
PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # as in safetensors itself
ALIGNMENT = 8
METADATA = "__metadata__"
SHOWN = 5
# Derived from the configuration, found in old checkpoints, loaded by nobody.
DERIVED = ".rotary_emb.inv_freq"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: bytes `[start, stop)` of the file."""

    name: str
    dtype: str  # name in the header, such as "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int
    width: int  # bytes of an element


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file, mapped."""

    header: bytes  # everything before the tensors
    spans: tuple[Span, ...]  # of all tensors, in the order of the file
    data: Bytes  # `[nbytes]` the whole file

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Map a file to read it; the mapping outlives the name.

        Raises:
            SyncError: it cannot be read, or is not a whole safetensors file.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise SyncError(f"the weights in {path} cannot be read: {error}") from error
        return cls.of(data)

    @classmethod
    def of(cls, data: Bytes) -> SafetensorsFile:
        """Find the tensors in the bytes of a whole file."""
        header = data[: header_bytes(data[:PREFIX_BYTES].tobytes())].tobytes()
        return cls(header, parse_header(header, len(data)), data)

    def tensor(self, span: Span) -> Bytes:
        return self.data[span.start : span.stop]


def header_bytes(prefix: bytes) -> int:
    return PREFIX_BYTES + int.from_bytes(prefix, "little")


def make_header(tensors: Iterable[tuple[str, str, Iterable[int], int]]) -> tuple[bytes, int]:
    """The header of a file of these tensors, and the size of the file.

    Args:
        tensors: name, dtype as in `Span`, shape and bytes of each, in the order of the file.
    """
    tree: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        start, end = end, end + nbytes
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(tree).encode()
    header = with_length(text + b" " * (-len(text) % ALIGNMENT))
    return header, len(header) + end


def with_length(text: bytes) -> bytes:
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def parse_header(header: bytes, nbytes: int) -> tuple[Span, ...]:
    """Where the tensors lie in a file of `nbytes` that begins with `header`."""
    try:
        if not PREFIX_BYTES < len(header) == header_bytes(header[:PREFIX_BYTES]) <= MAX_HEADER_BYTES:
            raise ValueError(f"it has {len(header)} bytes")
        tree = json.loads(header[PREFIX_BYTES:])
        spans = [parse_entry(name, entry, len(header)) for name, entry in tree.items() if name != METADATA]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SyncError(f"the weights have no safetensors header: {error}. Export them again") from error
    spans.sort(key=lambda s: (s.start, s.stop))
    edges = [len(header), *(s.stop for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != nbytes:
        raise SyncError(f"the tensors of the header do not fill a file of {nbytes} bytes: export the weights again")
    return tuple(spans)


def parse_entry(name: str, entry: Mapping[str, Any], offset: int) -> Span:
    """One entry of the header; the width follows from the shape, so that it needs no list of dtypes."""
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    count = math.prod(shape)
    width, rest = divmod(stop - start, count) if count else (1, 0)
    known = not rest and width in (1, 2, 4, 8)
    return Span(name, str(entry.get("dtype")), shape, offset + start, offset + stop, width if known else 1)


def folder_shapes(folder: Path, tied: bool) -> Shapes:
    """Shapes of the tensors of a Hugging Face folder; only the files' headers are read.

    Raises:
        SyncError: the folder holds no safetensors file.
    """
    files = [SafetensorsFile.open(path) for path in weight_files(folder)]
    if not files:
        raise SyncError(f"{folder} holds no model.safetensors, so that no weight update for this model can be checked")
    return counted_shapes({span.name: span.shape for file in files for span in file.spans}, tied)


def counted_shapes(shapes: Shapes, tied: bool) -> Shapes:
    """The tensors that trainer and engine must agree on; a head that is `tied` to the embedding does not count."""
    return {name: shape for name, shape in shapes.items() if not name.endswith(DERIVED) and not (tied and name == HEAD)}


def check_same(given: Shapes, expected: Shapes, what: str) -> None:
    """Refuse weights that are not exactly the model's."""
    faults = []
    if missing := sorted(expected.keys() - given.keys()):
        faults.append(f"{len(missing)} missing ({shown(missing)})")
    if unknown := sorted(given.keys() - expected.keys()):
        faults.append(f"{len(unknown)} unknown ({shown(unknown)})")
    if other := sorted(name for name in given.keys() & expected.keys() if given[name] != expected[name]):
        faults.append(f"{len(other)} of another shape ({shown([f'{n} {given[n]} for {expected[n]}' for n in other])})")
    if faults:
        raise SyncError(f"{what} does not fit the engine's model: {'; '.join(faults)}. It keeps the old weights")


def shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
