"""The state of a trainer rank as files: safetensors and JSON, nothing that could execute when it is read.

trainer.safetensors   parameter.NAME, exp_avg.NAME, exp_avg_sq.NAME, step.NAME, and the random number generators
trainer.json          how many updates were done
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tidemill.errors import CheckpointError
from tidemill.train.model import write_tensors

TENSORS, PROGRESS = "trainer.safetensors", "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
RNG, CUDA_RNG = "rng.cpu", "rng.cuda"
SHOWN = 5

Parameters = Mapping[str, torch.nn.Parameter]


def save_state(folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Write everything that training needs to go on as if it had not stopped."""
    tensors = {f"parameter.{name}": parameter.detach().contiguous() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for moment, value in optimizer.state[parameter].items():
            tensors[f"{moment}.{name}"] = value.contiguous()
    tensors[RNG] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[CUDA_RNG] = torch.cuda.get_rng_state()
    write_tensors(folder / TENSORS, tensors)
    (folder / PROGRESS).write_text(json.dumps({"updates": updates}) + "\n", encoding="utf-8")


def load_state(folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> int:
    """Read what `save_state` wrote into parameters and optimizer; returns the updates done.

    Raises:
        CheckpointError: a file is missing or broken, or it is the state of another model; nothing was changed.
    """
    try:
        updates = int(json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["updates"])
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} holds no readable trainer state: {error}") from error
    check_fits(folder, tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"parameter.{name}"])
            found = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in MOMENTS if f"{m}.{name}" in tensors}
            optimizer.state.pop(parameter, None)
            if found:  # none before the first update
                optimizer.state[parameter] = found
    torch.set_rng_state(tensors[RNG])
    if CUDA_RNG in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[CUDA_RNG])
    return updates


def check_fits(folder: Path, tensors: Mapping[str, Tensor], parameters: Parameters) -> None:
    """Refuse the state of another model.

    Raises:
        CheckpointError: naming the first parameters that differ.
    """
    prefix = "parameter."
    given = {name.removeprefix(prefix): tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    differing = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
    if differing:
        shown = ", ".join(f"{n}: {given.get(n)} for {wanted.get(n)}" for n in differing[:SHOWN])
        raise CheckpointError(
            f"{folder} is the state of another model; {len(differing)} parameters differ (saved, expected): {shown}. "
            "Resume with the model the run began with, or start a run under another name."
        )
    incomplete = sorted(
        f"{moment}.{name}"
        for name in wanted
        for moment in MOMENTS
        if f"exp_avg.{name}" in tensors and f"{moment}.{name}" not in tensors
    )
    if incomplete or RNG not in tensors:
        raise CheckpointError(f"{folder} is incomplete: {', '.join(incomplete[:SHOWN]) or RNG} is missing")
