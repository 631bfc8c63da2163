from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tidemill.models.precision import compute_dtype, computes_bfloat16, cpu_flags

CPU = torch.device("cpu")


def test_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu_flags(x86) == {"fpu", "avx2", "avx512_bf16"}
    assert cpu_flags(arm) == {"fp", "asimd", "bf16"}
    assert cpu_flags(tmp_path / "absent") == frozenset()


def test_auto_is_the_native_precision() -> None:
    expected = torch.bfloat16 if computes_bfloat16(CPU) else torch.float32
    assert compute_dtype("auto", "cpu") == expected


def test_float32_is_always_float32() -> None:
    assert compute_dtype("float32", CPU) == torch.float32


@pytest.mark.skipif(computes_bfloat16(CPU), reason="this processor computes in bfloat16")
def test_emulated_bfloat16_is_allowed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    assert "emulated" in caplog.text
