"""A safetensors file as bytes: its header, and where each tensor lies.

The format (https://huggingface.co/docs/safetensors): the length of the header as 8 little-endian bytes, the header as
JSON of `{name: {dtype, shape, data_offsets}}`, then the tensors. Read here as bytes because numpy has no bfloat16, and
because a file must come back byte for byte.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.errors import SyncError
from tidemill.weights.delta import Bytes

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # as in safetensors itself
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: bytes `[start, stop)` of the file, in elements of `width` bytes."""

    name: str
    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The weights of one version, mapped.

    Attributes:
        header: everything before the tensors.
        spans: of all tensors, in the order of the file.
        data: `[nbytes]` the whole file.
    """

    header: bytes
    spans: tuple[Span, ...]
    data: Bytes

    @classmethod
    def open(cls, path: Path) -> WeightFile:
        """Map a file; the mapping outlives the name.

        Raises:
            SyncError: it cannot be read, or is no whole safetensors file.
        """
        try:
            data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise SyncError(f"the weights in {path} cannot be read: {error}") from error
        header = data[: header_bytes(data[:PREFIX_BYTES].tobytes())].tobytes()
        return cls(header, spans(header, len(data)), data)

    def tensor(self, span: Span) -> Bytes:
        """The bytes of one tensor, not copied."""
        return self.data[span.start : span.stop]


def header_bytes(prefix: bytes) -> int:
    """Length of the header, its own length included."""
    return PREFIX_BYTES + int.from_bytes(prefix, "little")


def spans(header: bytes, nbytes: int) -> tuple[Span, ...]:
    """Where the tensors lie in a file of `nbytes` that begins with `header`.

    Raises:
        SyncError: this is no header of such a file.
    """
    try:
        if not PREFIX_BYTES < len(header) == header_bytes(header[:PREFIX_BYTES]) <= MAX_HEADER_BYTES:
            raise ValueError(f"it has {len(header)} bytes")
        tree = json.loads(header[PREFIX_BYTES:])
        found = [span(name, entry, len(header)) for name, entry in tree.items() if name != METADATA]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SyncError(f"the weights have no safetensors header: {error}. Export them again") from error
    found.sort(key=lambda s: (s.start, s.stop))
    edges = [len(header), *(s.stop for s in found)]
    if [s.start for s in found] != edges[:-1] or edges[-1] != nbytes:
        raise SyncError(f"the tensors of the header do not fill a file of {nbytes} bytes: export the weights again")
    return tuple(found)


def span(name: str, entry: dict[str, list[int]], offset: int) -> Span:
    """One entry of the header; the width follows from the shape, so that no list of dtypes has to be kept."""
    start, stop = entry["data_offsets"]
    count = math.prod(entry["shape"])
    width, rest = divmod(stop - start, count) if count else (1, 0)
    known = not rest and width in (1, 2, 4, 8)
    return Span(name, offset + start, offset + stop, width if known else 1)
