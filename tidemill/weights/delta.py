"""Encodings of one tensor: the change since the version before, or since zero. Pure functions.

same    nothing: no byte changed
xor     every element xor its base, in byte planes, compressed
sparse  the changed elements: the gap from one to the next (uint32) and their xor, in byte planes, compressed
raw     the bytes themselves, where compression gains nothing

The change is a xor and not a difference, because floating-point subtraction rounds and the tensor must arrive bit
for bit. Byte planes (all first bytes of the elements, then all second bytes, ...) put the sign, the exponent and the
high bits together. A small update does not change these, so zstd finds long runs of zeros. Byte planes also make
weights without a base smaller, by nearly a third in bfloat16 and a seventh in float32. A tensor has n elements of
`width` bytes, of which k changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Encoding = Literal["raw", "same", "xor", "sparse"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
LEVEL = 1  # of zstd; level 3 takes at least twice the time and makes the bits of floats hardly smaller
SPARSE_BELOW = 0.5  # share of changed elements; above it, gaps take more bytes than the zeros that they replace
GAP = np.dtype(np.uint32)
MAX_SPARSE_ELEMENTS = 1 << 32
ELEMENTS: Mapping[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded tensor."""

    encoding: Encoding
    data: bytes | memoryview


def checksum(data: memoryview | bytes) -> str:
    """XXH3 of 64 bits, hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def encode(new: Bytes, base: Bytes | None, width: int) -> Encoded:
    """Encode `new` in the smallest way for a receiver that has `base`.

    Args:
        new: `[n * width]` bytes of the tensor.
        base: its bytes one version before; None if the receiver has none and starts from zeros.
        width: bytes of an element: 1, 2, 4 or 8.

    Raises:
        ValueError: `base` has another length.
    """
    if base is not None and len(base) != len(new):
        raise ValueError(f"the base has {len(base)} bytes and the tensor {len(new)}")
    changes = elements(new if base is None else np.bitwise_xor(new, base), width)
    changed = int(np.count_nonzero(changes))
    if not changed:
        return Encoded("same", b"")
    sparse = changed < SPARSE_BELOW * len(changes) and len(changes) < MAX_SPARSE_ELEMENTS
    data = compress(sparse_planes(changes) if sparse else planes(changes))
    return Encoded("sparse" if sparse else "xor", data) if len(data) < len(new) else Encoded("raw", new.data)


def apply(encoding: Encoding, data: bytes | memoryview, tensor: Bytes, width: int) -> None:
    """Turn the base into the new tensor, in place. Damaged data may give other bytes: see `checksum`.

    Args:
        encoding: of `data`.
        data: from `encode`.
        tensor: `[n * width]` bytes, holding the base, or zeros; changed.
        width: as it was encoded with.

    Raises:
        ValueError: `data` does not fit the tensor, which is left as it was.
    """
    if encoding == "raw":
        if len(data) != len(tensor):
            raise ValueError(f"{len(data)} bytes for a tensor of {len(tensor)}")
        tensor[:] = np.frombuffer(data, np.uint8)
    elif encoding == "xor":
        changes = decompress(data, len(tensor), len(tensor))
        np.bitwise_xor(tensor, unplanes(changes, width), out=tensor)
    elif encoding == "sparse":
        apply_sparse(data, elements(tensor, width))
    elif len(data):
        raise ValueError(f"{len(data)} bytes for a tensor that did not change")


def apply_sparse(data: bytes | memoryview, tensor: NDArray[np.unsignedinteger]) -> None:
    """`apply` for the changed elements only; `tensor` is `[n]`."""
    width = tensor.itemsize
    decoded = decompress(data, 0, len(tensor) * (GAP.itemsize + width))
    count, rest = divmod(len(decoded), GAP.itemsize + width)
    gaps, changes = np.split(decoded, [count * GAP.itemsize])
    positions = np.cumsum(elements(unplanes(gaps, GAP.itemsize), GAP.itemsize), dtype=np.int64) if not rest else None
    if positions is None or (count and positions[-1] >= len(tensor)):
        raise ValueError(f"the changes do not fit a tensor of {len(tensor)} elements")
    tensor[positions] ^= elements(unplanes(changes, width), width)


def sparse_planes(changes: NDArray[np.unsignedinteger]) -> Bytes:
    """`[k * (4 + width)]`: the planes of the gaps, then those of the changes that are not zero."""
    positions = np.flatnonzero(changes != 0)  # four times as fast as on integers
    gaps = np.diff(positions, prepend=0).astype(GAP)
    return np.concatenate([planes(gaps), planes(changes[positions])])


def planes(values: NDArray[np.unsignedinteger]) -> Bytes:
    """All first bytes, then all second bytes, ...: `[n]` elements become `[n * width]` bytes."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def unplanes(data: Bytes, width: int) -> Bytes:
    """The inverse of `planes`, as bytes; plane by plane, because numpy transposes short rows ten times as slowly."""
    values = np.empty_like(data)
    for place, plane in enumerate(data.reshape(width, -1)):
        values[place::width] = plane
    return values


def elements(data: Bytes, width: int) -> NDArray[np.unsignedinteger]:
    return data.view(ELEMENTS[width])


def compress(data: Bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data.data)


def decompress(data: bytes | memoryview, least: int, most: int) -> Bytes:
    """The content of a frame, if its stated length is between the two: a damaged frame may state any length.

    Raises:
        ValueError: another length, or no zstd frame.
    """
    try:
        nbytes = zstandard.frame_content_size(data)
        if not least <= nbytes <= most:
            raise ValueError(f"the frame has {nbytes} bytes; it must have {least} to {most}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a whole zstd frame: {error}") from error
