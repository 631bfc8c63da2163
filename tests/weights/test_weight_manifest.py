"""The manifest of a published version, by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.errors import ChainError
from tidemill.weights.delta import checksum
from tidemill.weights.manifest import Location, StoredTensor, WeightManifest

PART = (StoredTensor("a", "xor", 7, "00"), StoredTensor("b", "same", 0, "11"))
MANIFEST = WeightManifest(3, 11, '{"a": {}}', 99, (PART, (StoredTensor("c", "raw", 5, "22"),)))


def rewritten(**changes: Any) -> bytes:
    """With other contents, and the checksum that belongs to them."""
    body = json.dumps(json.loads(MANIFEST.to_bytes().partition(b"\n")[2]) | changes).encode()
    return f"{checksum(body)}\n".encode() + body


def test_a_manifest_reads_back_and_knows_what_is_stored() -> None:
    assert WeightManifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert WeightManifest.from_bytes(rewritten()) == MANIFEST
    assert MANIFEST.stored_bytes == 12


def test_a_manifest_of_another_release_or_encoding_is_refused() -> None:
    with pytest.raises(ChainError, match="of another format: trainer and engines must run the same"):
        WeightManifest.from_bytes(rewritten(format=2))
    tensor = {"name": "a", "encoding": "newer", "nbytes": 1, "checksum": "00"}
    with pytest.raises(ChainError, match="unknown encoding"):
        WeightManifest.from_bytes(rewritten(parts=[[tensor]]))


@pytest.mark.parametrize(
    "key", ["", "runs/a/weights/00000001", "runs/a/weights/3f9a1c0e/1", "runs/a/3f9a1c0g/00000001"]
)
def test_a_key_of_another_form_is_refused(key: str) -> None:
    assert Location.parse("runs/a/weights/3f9a1c0e/00000012") == Location("runs/a/weights", "3f9a1c0e", 12)
    with pytest.raises(ChainError, match="publish the weights again"):
        Location.parse(key)
