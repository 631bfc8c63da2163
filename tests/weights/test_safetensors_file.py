"""A safetensors file as bytes, and the tensors that an update must hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from tidemill.errors import SyncError
from tidemill.weights.safetensors_file import SafetensorsFile, check_same, folder_shapes, parse_header

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


MODEL = {"embed.weight": (4, 2), "layers.0.q_proj.weight": (2, 2)}


def write(folder: Path, *names: str, file: str = "model") -> Path:
    save_arrays({name: np.zeros(1, np.float32) for name in names}, folder / f"{file}.safetensors")
    return folder / f"{file}.safetensors"


def test_the_same_tensors_pass() -> None:
    check_same(dict(MODEL), MODEL, "version 1")


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"embed.weight": (4, 2)}, r"1 missing \(layers\.0\.q_proj\.weight\)"),
        (MODEL | {"extra": (1,)}, r"1 unknown \(extra\)"),
        (MODEL | {"embed.weight": (2, 4)}, r"1 of another shape \(embed\.weight \(2, 4\) for \(4, 2\)\)"),
    ],
)
def test_other_tensors_are_named(given: dict[str, tuple[int, ...]], fault: str) -> None:
    with pytest.raises(SyncError, match=f"version 1 does not fit .*{fault}"):
        check_same(given, MODEL, "version 1")


def test_long_lists_are_cut() -> None:
    with pytest.raises(SyncError, match=r"9 missing \(t0, t1, t2, t3, t4, \.\.\.\)"):
        check_same({}, {f"t{i}": (1,) for i in range(9)}, "x")


def test_all_shards_of_a_folder_count_and_no_other_files(tmp_path: Path) -> None:
    """Mistral publishes some models in its own format too, with other names of the tensors."""
    shards = {"a": write(tmp_path, "a", file="model-1").name, "b": write(tmp_path, "b", "c", file="model-2").name}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    write(tmp_path, "tok_embeddings.weight", file="consolidated")
    assert folder_shapes(tmp_path, tied=False).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(("tied", "names"), [(True, {"a"}), (False, {"a", "lm_head.weight"})])
def test_a_tied_head_is_no_tensor_of_its_own(tmp_path: Path, tied: bool, names: set[str]) -> None:
    write(tmp_path, "a", "lm_head.weight")
    assert folder_shapes(tmp_path, tied).keys() == names


def test_derived_tensors_of_old_checkpoints_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "a", "layers.0.self_attn.rotary_emb.inv_freq")
    assert folder_shapes(tmp_path, tied=False).keys() == {"a"}


def test_a_folder_without_safetensors_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"holds no model\.safetensors"):
        folder_shapes(tmp_path, tied=False)
