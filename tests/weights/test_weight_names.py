"""Which tensors an update must hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tidemill.errors import SyncError
from tidemill.weights.safetensors_file import check_same, folder_shapes

MODEL = {"embed.weight": (4, 2), "layers.0.q_proj.weight": (2, 2)}


def write(folder: Path, *names: str) -> None:
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, folder / f"{names[0]}.safetensors")


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


def test_all_shards_of_a_folder_count(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", "c")
    assert folder_shapes(tmp_path, tied=False).keys() == {"a", "b", "c"}


@pytest.mark.parametrize(("tied", "names"), [(True, {"a"}), (False, {"a", "lm_head.weight"})])
def test_a_tied_head_is_no_tensor_of_its_own(tmp_path: Path, tied: bool, names: set[str]) -> None:
    write(tmp_path, "a", "lm_head.weight")
    assert folder_shapes(tmp_path, tied).keys() == names


def test_derived_tensors_of_old_checkpoints_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "a", "layers.0.self_attn.rotary_emb.inv_freq")
    assert folder_shapes(tmp_path, tied=False).keys() == {"a"}


def test_a_folder_without_safetensors_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match=r"holds no \*\.safetensors"):
        folder_shapes(tmp_path, tied=False)
