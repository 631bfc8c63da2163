"""The precision in which a device computes, for trainer and engines alike."""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Literal

import torch

logger = logging.getLogger(__name__)

Setting = Literal["auto", "bfloat16", "float32"]
# x86 with AVX-512 or AMX instructions for bfloat16; `bf16` is Linux's name of ARM's.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def compute_dtype(setting: Setting, device: torch.device | str) -> torch.dtype:
    """The dtype of matrix products.

    `auto` is bfloat16 where the processor has instructions for it and float32 elsewhere, because emulated bfloat16
    is several times slower than float32. Asking for bfloat16 on such a processor is allowed and logged.

    Args:
        setting: from the config.
        device: runs the computation.
    """
    native = computes_bfloat16(torch.device(device))
    if setting == "auto":
        return torch.bfloat16 if native else torch.float32
    if setting == "bfloat16" and not native:
        logger.warning(
            "bfloat16 is emulated on this %s (%s) and slow; precision float32 or auto is faster",
            torch.device(device).type,
            platform.machine(),
        )
    return torch.bfloat16 if setting == "bfloat16" else torch.float32


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and not BFLOAT16_FLAGS.isdisjoint(cpu_flags(Path("/proc/cpuinfo")))


def cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Instruction set flags of the first processor; empty on a kernel without this file."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
