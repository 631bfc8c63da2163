"""A safetensors file as bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.errors import SyncError
from tidemill.weights.safetensors_file import SafetensorsFile, parse_header

TENSORS = {
    "b": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a": torch.arange(6, dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 5),
    "bytes": torch.arange(3, dtype=torch.uint8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "w.safetensors", metadata={"format": "pt"})
    return tmp_path / "w.safetensors"


def test_every_tensor_is_found_with_its_bytes_and_width(path: Path) -> None:
    file = SafetensorsFile.open(path)
    loaded = load_file(path)
    assert {span.name for span in file.spans} == loaded.keys()
    for span in file.spans:
        tensor = loaded[span.name].reshape(-1)
        assert file.tensor(span).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
        assert span.width == (tensor.dtype.itemsize if tensor.numel() else 1)


def test_header_and_tensors_are_the_whole_file(path: Path) -> None:
    file = SafetensorsFile.open(path)
    assert file.header + b"".join(file.tensor(span).tobytes() for span in file.spans) == path.read_bytes()


def test_the_mapping_outlives_the_name(path: Path) -> None:
    data = path.read_bytes()
    file = SafetensorsFile.open(path)
    path.unlink()
    assert file.data.tobytes() == data


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_file_that_was_cut_short_is_refused(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SyncError, match=r"cannot be read|no safetensors header|do not fill"):
        SafetensorsFile.open(path)


@pytest.mark.parametrize(
    "tree",
    [
        [],
        {"a": {"shape": [1]}},
        {"a": {"shape": [2], "data_offsets": [4, 6]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}, "b": {"shape": [1], "data_offsets": [2, 8]}},
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(tree: object) -> None:
    text = json.dumps(tree).encode()
    header = len(text).to_bytes(8, "little") + text
    with pytest.raises(SyncError, match=r"no safetensors header|do not fill"):
        parse_header(header, len(header) + 8)
