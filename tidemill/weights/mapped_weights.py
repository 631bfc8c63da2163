"""Weights in memory that trainer and engines of one host share: safetensors files that are written again and again.

The first touch of a page costs several times what copying it does, and is paid for each new file and for each new
mapping. So a file is used again for a later version, and each process keeps its mapping for as long as the file has a
name. A file is locked while it is used: shared by those who read, alone by the one who has it written.

A version of a few megabytes is copied in a millisecond, so whatever is known from the mapping is not read again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from tidemill.errors import SyncError
from tidemill.weights.weight_file import METADATA, PREFIX_BYTES, header_bytes, spans

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file that is mapped.

    Attributes:
        nbytes: of the file.
        tensors: by name, views of the file. Writing to them writes to it, or kills a process that may only read.
    """

    nbytes: int
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, file: IO[bytes]) -> Mapped:
        """Map a safetensors file with all its pages, to write to it where it is open for that.

        Raises:
            SyncError: this is no whole safetensors file, or one of other types.
        """
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < PREFIX_BYTES:
            raise SyncError(f"{file.name} has {nbytes} bytes: this is no safetensors file. Export the weights again")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if file.writable() else 0)
        data = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        header = data[: header_bytes(data[:PREFIX_BYTES])]
        where = {span.name: span for span in spans(header, nbytes)}
        with warnings.catch_warnings(action="ignore"):  # that torch cannot protect memory that is only to be read
            array = torch.frombuffer(data, dtype=torch.uint8)
        entries = ((name, entry) for name, entry in json.loads(header[PREFIX_BYTES:]).items() if name != METADATA)
        try:
            tensors = {
                name: array[where[name].start : where[name].stop].view(DTYPES[entry["dtype"]]).view(entry["shape"])
                for name, entry in entries
            }
        except (KeyError, RuntimeError) as error:
            raise SyncError(f"the tensors in {file.name} cannot be used as they lie there: {error!r}") from error
        return cls(nbytes, tensors)

    def holds(self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether it has room for these parameters as `dtype`, and for no others."""
        return self.tensors.keys() == parameters.keys() and all(
            tensor.dtype == dtype and tensor.shape == parameters[name].shape for name, tensor in self.tensors.items()
        )


class MappedWeights:
    """The mappings of one process, which either writes or reads, by inode; all files are in one folder."""

    def __init__(self) -> None:
        self.kept: dict[int, Mapped] = {}

    @contextmanager
    def reading(self, path: Path, nbytes: int) -> Iterator[Mapped]:
        """A version to read, which nobody changes during the body.

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
        parameters: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> int:
        """Write parameters by their Hugging Face names, as `dtype`, in one pass; returns the bytes of the file.

        A file of the same tensors that this process wrote before is written over, so it must be one that nobody reads:
        see `outbox.alone`. A head that is tied to the embedding is the same parameter and stands under the embedding's
        name only.

        Args:
            path: of the file; None on ranks that only take part in bringing the parameters together.
            parameters: in the same order on all ranks.
            dtype: of the file.
            whole: brings a parameter together that is spread over ranks.

        Raises:
            OSError: no room.
        """
        if path is None:
            for parameter in parameters.values():
                whole(parameter.detach())
            return 0
        mapped = self.writable(path, parameters, dtype)
        for name, parameter in parameters.items():
            mapped.tensors[name].copy_(whole(parameter.detach()))
        return mapped.nbytes

    def writable(self, path: Path, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Mapped:
        """A file of these tensors: the one that is there, if this process has it mapped, or a new one."""
        kept = self.kept.get(path.stat().st_ino) if path.exists() else None
        if kept is not None and kept.holds(parameters, dtype):
            return kept
        path.unlink(missing_ok=True)
        create(path, *layout(parameters, dtype))
        with path.open("r+b") as file:
            return self.mapped(path, file)

    def mapped(self, path: Path, file: IO[bytes]) -> Mapped:
        """An open file, mapped; lets go of those that have no name in its folder any more."""
        named = {entry.inode() for entry in os.scandir(path.parent)}
        self.kept = {inode: mapped for inode, mapped in self.kept.items() if inode in named}
        inode = os.fstat(file.fileno()).st_ino
        if inode not in self.kept:
            self.kept[inode] = Mapped.of(file)
        return self.kept[inode]


def check_current(path: Path, file: IO[bytes], nbytes: int) -> None:
    """Refuse a file that has lost its name since it was opened, was cut short, or is not the announced one."""
    if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
        raise SyncError(f"{path} was replaced by a newer version")
    size = os.fstat(file.fileno()).st_size
    if size != nbytes:
        raise SyncError(f"{path} has {size} bytes and was announced with {nbytes}: the export did not arrive whole")


def layout(parameters: Mapping[str, Any], dtype: torch.dtype) -> tuple[bytes, int]:
    """The header of a safetensors file of these tensors, all of one type, and the size of the file."""
    tree: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, parameter in parameters.items():
        start, end = end, end + parameter.numel() * dtype.itemsize
        tree[name] = {"dtype": NAMES[dtype], "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, PREFIX_BYTES + len(text) + end


def create(path: Path, header: bytes, nbytes: int) -> None:
    """A file with this header. Its memory is taken now: later there would be a signal, not an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError:
            path.unlink()
            raise
