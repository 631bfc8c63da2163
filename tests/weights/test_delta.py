"""What changed in a tensor comes back bit for bit, and what is damaged does not pass."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.weights.delta import Bytes, Encoded, apply, checksum, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
WIDTHS = st.sampled_from([1, 2, 4, 8])


def raw(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


@st.composite
def versions(draw: st.DrawFn, count: int = 2) -> tuple[int, list[Bytes]]:
    """Element width and `count` versions of a tensor: any bits (so NaN and -0 too), a share of which changes."""
    width, size = draw(WIDTHS), draw(st.integers(0, 300))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = [random.integers(0, 256, size * width, np.uint8)]
    for _ in range(count - 1):
        share = draw(st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]))
        changes = random.integers(0, draw(st.sampled_from([2, 256])), (size, width), np.uint8)
        found.append(found[-1] ^ (changes * (random.random((size, 1)) < share)).astype(np.uint8).reshape(-1))
    return width, found


def applied(encoded: Encoded, base: Bytes, width: int) -> Bytes:
    tensor = base.copy()
    apply(encoded.encoding, encoded.data, tensor, width)
    return tensor


@given(versions())
def test_a_delta_gives_the_new_tensor_bit_for_bit(case: tuple[int, list[Bytes]]) -> None:
    width, (base, new) = case
    encoded = encode(new, base, width)
    assert applied(encoded, base, width).tobytes() == new.tobytes()
    assert len(encoded.data) <= len(new)
    assert (encoded.encoding == "same") == (base.tobytes() == new.tobytes())


@given(versions())
def test_a_tensor_without_a_base_is_made_from_zeros(case: tuple[int, list[Bytes]]) -> None:
    width, (_, new) = case
    assert applied(encode(new, None, width), np.zeros_like(new), width).tobytes() == new.tobytes()


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.7), (torch.float32, 0.85)])
def test_weights_without_a_base_travel_compressed(dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(0)
    new = raw((torch.randn(1_000_000) * 0.02).to(dtype))
    assert len(encode(new, None, dtype.itemsize).data) < share * len(new)


@given(versions(count=6))
def test_a_chain_of_deltas_gives_the_last_tensor(case: tuple[int, list[Bytes]]) -> None:
    width, chain = case
    tensor = chain[0].copy()
    for base, new in pairwise(chain):
        encoded = encode(new, base, width)
        apply(encoded.encoding, encoded.data, tensor, width)
        assert checksum(tensor.data) == checksum(new.data)
    assert tensor.tobytes() == chain[-1].tobytes()


@settings(max_examples=300)
@given(versions(), st.data())
def test_a_damaged_byte_is_noticed(case: tuple[int, list[Bytes]], data: st.DataObject) -> None:
    width, (base, new) = case
    encoded = encode(new, base, width)
    damaged = bytearray(encoded.data)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    tensor = base.copy()
    try:
        apply(encoded.encoding, bytes(damaged), tensor, width)
    except ValueError:
        assert tensor.tobytes() == base.tobytes()
    else:
        assert (checksum(tensor.data) == checksum(new.data)) == (tensor.tobytes() == new.tobytes())


@given(versions(), st.integers(0, 40))
def test_a_delta_that_was_cut_short_is_refused(case: tuple[int, list[Bytes]], kept: int) -> None:
    width, (base, new) = case
    encoded = encode(new, base, width)
    if kept < len(encoded.data):
        with pytest.raises(ValueError, match=r"bytes for a tensor|not a whole zstd frame|the frame has"):
            apply(encoded.encoding, encoded.data[:kept], base.copy(), width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    base = torch.randn(size) * 50
    new = base + torch.randn(size) * (torch.rand(size) < 0.1)
    old, fresh = raw(base.to(dtype)), raw(new.to(dtype))
    assert applied(encode(fresh, old, dtype.itemsize), old, dtype.itemsize).tobytes() == fresh.tobytes()


@pytest.mark.parametrize(
    ("dtype", "rate", "encoding", "share"),
    [
        (torch.bfloat16, 0.0, "same", 0.0),
        (torch.bfloat16, 1e-6, "sparse", 0.03),
        (torch.bfloat16, 2e-4, "xor", 0.4),
        (torch.float32, 1e-6, "xor", 0.5),
    ],
)
def test_steps_of_a_learning_rate_travel_in_a_share_of_the_bytes(
    dtype: torch.dtype, rate: float, encoding: str, share: float
) -> None:
    """Weights of deviation 0.02, each moved by up to `rate`."""
    torch.manual_seed(0)
    base = torch.randn(100_000) * 0.02
    old, new = raw(base.to(dtype)), raw((base + rate * (2 * torch.rand(100_000) - 1)).to(dtype))
    encoded = encode(new, old, dtype.itemsize)
    assert encoded.encoding == encoding
    assert len(encoded.data) <= share * len(new)


def test_random_changes_travel_raw() -> None:
    random = np.random.default_rng(0)
    old, new = random.integers(0, 256, (2, 4096), np.uint8)
    assert encode(new, old, 4).encoding == "raw"


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the base has 4 bytes and the tensor 8"):
        encode(np.zeros(8, np.uint8), np.zeros(4, np.uint8), 4)


def test_a_frame_that_asks_for_more_than_the_tensor_is_refused_before_it_is_unpacked() -> None:
    bomb = encode(np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), 1)
    for encoding in ("xor", "sparse"):
        with pytest.raises(ValueError, match="the frame has"):
            apply(encoding, bomb.data, np.zeros(16, np.uint8), 1)
