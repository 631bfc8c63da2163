"""The state of a trainer rank as files: safetensors and JSON, nothing that could execute when it is read.

trainer.safetensors   parameter.NAME, exp_avg.NAME, exp_avg_sq.NAME, step.NAME, and the random number generators
trainer.json          the number of updates done
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidemill.errors import CheckpointError
from tidemill.train.sharding import full_tensor, local_rows, shard_like
from tidemill.weights.tensor_files import write_tensors

TENSORS, PROGRESS = "trainer.safetensors", "trainer.json"
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
RNG, CUDA_RNG = "rng.cpu", "rng.cuda"
SHOWN = 5

Parameters = Mapping[str, torch.nn.Parameter]


def save_state(folder: Path | None, parameters: Parameters, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Write everything that training needs to continue exactly; `folder` is None on all ranks but the first."""
    tensors: dict[str, Tensor] = {f"parameter.{name}": parameter for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = value
    tensors[RNG] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[CUDA_RNG] = torch.cuda.get_rng_state()
    write_tensors(folder / TENSORS if folder else None, tensors, gather=full_tensor)
    if folder:
        (folder / PROGRESS).write_text(json.dumps({"updates": updates}) + "\n", encoding="utf-8")


def load_state(folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> int:
    """Read what `save_state` wrote into parameters and optimizer; returns the number of updates done.

    Raises:
        CheckpointError: a file is missing or broken, or it is the state of another model; nothing is changed then.
    """
    try:
        updates = int(json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["updates"])
        with safe_open(folder / TENSORS, "pt") as tensors:
            names = tensors.keys()
            check_fits(folder, {name: tuple(tensors.get_slice(name).get_shape()) for name in names}, parameters)
            fill(tensors, parameters, optimizer)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a readable trainer state: {error}") from error
    return updates


@torch.no_grad()
def fill(tensors: Any, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Read the tensors one at a time, and of each only the rows that this rank stores."""
    names = set(tensors.keys())
    for name, parameter in parameters.items():
        rows = local_rows(parameter)
        parameter.copy_(shard_like(tensors.get_slice(f"parameter.{name}")[rows], parameter))
        optimizer.state.pop(parameter, None)
        if f"exp_avg.{name}" in names:  # none before the first update
            moments = {kind: shard_like(tensors.get_slice(f"{kind}.{name}")[rows], parameter) for kind in MOMENTS}
            optimizer.state[parameter] = moments | {STEP: tensors.get_tensor(f"{STEP}.{name}").to(parameter.device)}
    torch.set_rng_state(tensors.get_tensor(RNG))
    if CUDA_RNG in names and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors.get_tensor(CUDA_RNG))


def check_fits(folder: Path, shapes: Mapping[str, tuple[int, ...]], parameters: Parameters) -> None:
    prefix = "parameter."
    given = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    differing = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
    if differing:
        shown = ", ".join(f"{n}: {given.get(n)} for {wanted.get(n)}" for n in differing[:SHOWN])
        raise CheckpointError(
            f"{folder} is the state of another model; {len(differing)} parameters differ (saved, expected): {shown}. "
            "Resume with the model that the run started from, or start a run under another name."
        )
    incomplete = sorted(
        f"{moment}.{name}"
        for name in wanted
        for moment in (*MOMENTS, STEP)
        if f"exp_avg.{name}" in shapes and f"{moment}.{name}" not in shapes
    )
    if incomplete or RNG not in shapes:
        raise CheckpointError(f"{folder} is incomplete: {', '.join(incomplete[:SHOWN]) or RNG} is missing")
