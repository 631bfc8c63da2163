"""Which tensors a model consists of, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from tidemill.errors import SyncError

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 5
# Derived from the configuration, found in old checkpoints, loaded by nobody.
DERIVED = ".rotary_emb.inv_freq"
HEAD = "lm_head.weight"


def folder_shapes(folder: Path, tied: bool) -> Shapes:
    """The tensors of a model folder; only the files' headers are read.

    Raises:
        SyncError: the folder holds no safetensors file.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    if not found:
        raise SyncError(f"{folder} holds no *.safetensors, so that no weight update for this model can be checked")
    return counted(found, tied)


def counted(found: Shapes, tied: bool) -> Shapes:
    """What must be equal on both sides; a head that is `tied` to the embedding does not count."""
    return {name: shape for name, shape in found.items() if not name.endswith(DERIVED) and not (tied and name == HEAD)}


def check_same(given: Shapes, expected: Shapes, what: str) -> None:
    """Refuse weights that are not exactly the model's.

    Raises:
        SyncError: naming the tensors that are missing, unknown, or of another shape.
    """
    faults = []
    if missing := sorted(expected.keys() - given.keys()):
        faults.append(f"{len(missing)} missing ({shown(missing)})")
    if unknown := sorted(given.keys() - expected.keys()):
        faults.append(f"{len(unknown)} unknown ({shown(unknown)})")
    if other := sorted(name for name in given.keys() & expected.keys() if given[name] != expected[name]):
        faults.append(f"{len(other)} of another shape ({shown([f'{n} {given[n]} for {expected[n]}' for n in other])})")
    if faults:
        raise SyncError(f"{what} does not fit the engine's model: {'; '.join(faults)}. The old weights are kept")


def shown(names: list[str]) -> str:
    """The first few names."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
