"""Tensors in safetensors files: written one by one, or in memory that trainer and engines of one host share.

The first touch of a page costs several times what copying it does, and is paid for each new file and for each new
mapping. So a file in shared memory is written again for a later version, and each process keeps its mapping for as long
as the file has a name. A file is locked while it is used: shared by its readers, exclusively by its writer.

A version of a few megabytes is copied in a millisecond, so nothing is read again that the mapping already tells.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from tidemill.errors import SyncError
from tidemill.weights.safetensors_file import PREFIX_BYTES, SafetensorsFile, make_header

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Gather = Callable[[Tensor], Tensor]
"""Brings a tensor together that is sharded over ranks; all ranks call it at once."""


@torch.no_grad()
def write_tensors(
    path: Path | None, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, gather: Gather = Tensor.detach
) -> int:
    """Write one safetensors file, whole or not at all; returns its bytes. Only one tensor is whole at a time.

    Args:
        path: of the file; None on a rank that only takes part in `gather`.
        tensors: in the same order on all ranks.
        dtype: of all tensors in the file; None keeps each one's own.
        gather: see `Gather`.
    """
    if path is None:
        for tensor in tensors.values():
            gather(tensor.to(dtype or tensor.dtype))
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    header, nbytes = header_of(tensors, dtype)
    try:
        with partial.open("wb") as file:
            file.write(header)
            for tensor in tensors.values():
                whole = gather(tensor.to(dtype or tensor.dtype)).cpu().contiguous()
                file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return nbytes


def header_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[bytes, int]:
    stored = {name: dtype or tensor.dtype for name, tensor in tensors.items()}
    return make_header(
        (name, NAMES[stored[name]], tensor.shape, tensor.numel() * stored[name].itemsize)
        for name, tensor in tensors.items()
    )


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file that is mapped."""

    nbytes: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, file: IO[bytes]) -> Mapped:
        """Map a safetensors file with all its pages; to write to it, if it is open for that."""
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < PREFIX_BYTES:
            raise SyncError(f"{file.name} has {nbytes} bytes: this is no safetensors file. Export the weights again")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if file.writable() else 0)
        data = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        spans = SafetensorsFile.of(np.frombuffer(data, np.uint8)).spans
        with warnings.catch_warnings(action="ignore"):  # torch cannot protect memory that is only to be read
            array = torch.frombuffer(data, dtype=torch.uint8)
        try:
            tensors = {s.name: array[s.start : s.stop].view(DTYPES[s.dtype]).view(s.shape) for s in spans}
        except (KeyError, RuntimeError) as error:
            raise SyncError(f"the tensors in {file.name} cannot be used as they lie there: {error!r}") from error
        return cls(nbytes, tensors)

    def holds(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        return self.tensors.keys() == parameters.keys() and all(
            tensor.dtype == dtype and tensor.shape == parameters[name].shape for name, tensor in self.tensors.items()
        )


class MappedWeights:
    """The mappings of a process, by inode. It either writes or reads, and all files are in one folder."""

    def __init__(self) -> None:
        self.kept: dict[int, Mapped] = {}

    @contextmanager
    def reading(self, path: Path, nbytes: int) -> Iterator[Mapped]:
        """Read a version, which nobody changes during the body.

        Raises:
            SyncError: it has been replaced, another size was announced, or it is no safetensors file.
            OSError: there is no such file.
        """
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SyncError(f"{path} is being replaced by a newer version") from error
            try:
                check_current(path, file, nbytes)
                yield self.mapped(path, file)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing does not: a mapping holds the file open

    def write(
        self,
        path: Path | None,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        gather: Gather = Tensor.detach,
    ) -> int:
        """Write parameters by their Hugging Face names, as `dtype`, in one pass; returns the bytes of the file.

        A file of the same tensors that this process wrote before is written again in place, so nobody may read it: see
        `transport.writer_lock`. A head that is tied to the embedding is the same parameter and is written under the
        embedding's name only.

        Args:
            path: of the file; None on a rank that only takes part in `gather`.
            parameters: in the same order on all ranks.
            dtype: of the file.
            gather: see `Gather`.

        Raises:
            OSError: no room.
        """
        if path is None:
            for parameter in parameters.values():
                gather(parameter.detach())
            return 0
        mapped = self.writable(path, parameters, dtype)
        for name, parameter in parameters.items():
            mapped.tensors[name].copy_(gather(parameter.detach()))
        return mapped.nbytes

    def writable(self, path: Path, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Mapped:
        """A file for these tensors: the present one, if this process has it mapped, or a new one."""
        kept = self.kept.get(path.stat().st_ino) if path.exists() else None
        if kept is not None and kept.holds(parameters, dtype):
            return kept
        path.unlink(missing_ok=True)
        create(path, *header_of(parameters, dtype))
        with path.open("r+b") as file:
            return self.mapped(path, file)

    def mapped(self, path: Path, file: IO[bytes]) -> Mapped:
        """Map an open file; drop the mappings of files that have no name in its folder any more."""
        named = {entry.inode() for entry in os.scandir(path.parent)}
        self.kept = {inode: mapped for inode, mapped in self.kept.items() if inode in named}
        inode = os.fstat(file.fileno()).st_ino
        if inode not in self.kept:
            self.kept[inode] = Mapped.of(file)
        return self.kept[inode]


def check_current(path: Path, file: IO[bytes], nbytes: int) -> None:
    """Refuse a file that lost its name since it was opened, or has not the announced size."""
    if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
        raise SyncError(f"{path} was replaced by a newer version")
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        raise SyncError(f"{path} has {size} bytes and was announced with {nbytes}: the export did not arrive whole")


def create(path: Path, header: bytes, nbytes: int) -> None:
    """Create a file with this header. Its memory is taken now: later, a lack of it would be a signal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError:
            path.unlink()
            raise
