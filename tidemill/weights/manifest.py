"""The layout of versions in the object store.

    runs/NAME/weights/3f9a1c0e/00000012/part-0000       encoded tensors, one after another
    runs/NAME/weights/3f9a1c0e/00000012/manifest        written last: without it the version does not exist

`3f9a1c0e` is an attempt at the run and 12 the serial number of a publication. A delta names its base by both, because
the same policy version has other weights after a restart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tidemill.errors import ChainError
from tidemill.store.object_store import ObjectStore
from tidemill.weights.delta import ENCODINGS, Encoding, checksum
from tidemill.weights.safetensors_file import with_length

FORMAT = 1
MANIFEST = "manifest"
LOCATION = re.compile(r"^(?P<run>.+)/(?P<attempt>[0-9a-f]{8})/(?P<serial>\d{8,})$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a part."""

    name: str  # Hugging Face parameter name
    encoding: Encoding  # of its bytes in the part
    nbytes: int  # how many those are
    checksum: str  # XXH3 of the tensor's own bytes, once decoded


Part = tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a version lies in the bucket."""

    prefix: str
    attempt: str
    serial: int

    @classmethod
    def parse(cls, key: str) -> Location:
        match = LOCATION.match(key)
        if match is None:
            raise ChainError(f"{key} is not the key of a published version: publish the weights again")
        return cls(match["run"], match["attempt"], int(match["serial"]))

    @property
    def key(self) -> str:
        return f"{self.prefix}/{self.attempt}/{self.serial:08d}"

    @property
    def manifest_key(self) -> str:
        """The object whose existence is the version."""
        return f"{self.key}/{MANIFEST}"

    def part_key(self, number: int) -> str:
        return f"{self.key}/part-{number:04d}"

    def at(self, serial: int) -> Location:
        """Another publication of the same attempt."""
        return Location(self.prefix, self.attempt, serial)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A version in the store."""

    version: int  # policy version
    base: int | None  # serial number that the deltas are against; None if no tensor needs one
    header: str  # of the safetensors file, without its length
    nbytes: int  # of the safetensors file
    parts: tuple[Part, ...]  # the tensors of each

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def header_bytes(self) -> bytes:
        return with_length(self.header.encode())

    def tensors(self) -> Iterator[StoredTensor]:
        return (tensor for part in self.parts for tensor in part)

    def to_bytes(self) -> bytes:
        """As it is stored: a line with the checksum of what follows, then JSON."""
        body = json.dumps({"format": FORMAT, **asdict(self)}).encode()
        return f"{checksum(body)}\n".encode() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightManifest:
        line, _, body = data.partition(b"\n")
        if line != checksum(body).encode():
            raise ChainError("its manifest is damaged")
        tree = json.loads(body)
        if tree.pop("format") != FORMAT:
            raise ChainError("its manifest is of another format: trainer and engines must run the same Tidemill")
        parts = tuple(tuple(StoredTensor(**tensor) for tensor in part) for part in tree.pop("parts"))
        if any(tensor.encoding not in ENCODINGS for part in parts for tensor in part):
            raise ChainError("its manifest names an unknown encoding")
        return cls(parts=parts, **tree)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version in the store: where it lies, and what it consists of."""

    location: Location
    manifest: WeightManifest

    @classmethod
    def load(cls, store: ObjectStore, location: Location) -> StoredVersion:
        try:
            return cls(location, WeightManifest.from_bytes(store.get_bytes(location.manifest_key)))
        except ChainError as error:
            raise ChainError(f"{store.uri(location.key)} cannot be used: {error}") from error


def weights_prefix(run_name: str) -> str:
    return f"runs/{run_name}/weights"
