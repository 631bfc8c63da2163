"""The trainer's side of the object store: uploads a version as a full snapshot, or as the change since the last one."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import StoreError
from tidemill.protocols import WeightUpdate
from tidemill.store.object_store import ObjectStore
from tidemill.weights.delta import checksum, encode
from tidemill.weights.manifest import Location, Part, StoredTensor, WeightManifest
from tidemill.weights.safetensors_file import PREFIX_BYTES, SafetensorsFile, Span
from tidemill.weights.transport import Publication

PART_BYTES = 32 << 20  # of tensors, before they are encoded; a larger tensor goes alone
THREADS = 4  # zstd, xor, checksums and the network all release the interpreter lock

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest version in the store, which is the base of the next delta."""

    version: int
    location: Location
    file: SafetensorsFile


class WeightUploader:
    """Uploads the weights of one attempt at a run; blocking, one call at a time.

    Args:
        prefix: key below which the weights of the run lie.
        full_every: a full snapshot every so many publications, deltas in between.
    """

    def __init__(self, prefix: str, full_every: int) -> None:
        self.first, self.full_every = Location(prefix, secrets.token_hex(4), 0), full_every
        self.newest: Newest | None = None
        self.fulls: list[int] = []

    @property
    def nbytes(self) -> int:
        """Size of the newest export, which the next one will have too; 0 before the first."""
        return len(self.newest.file.data) if self.newest else 0

    def publish(self, store: ObjectStore, version: int, path: Path) -> Publication:
        """Upload an exported file. Its name is removed, and its memory is freed when the next version is published.

        Raises:
            StoreError: the store failed; the version does not exist and the one before it is intact.
            SyncError: this is not a safetensors file.
        """
        file = SafetensorsFile.open(path)
        path.unlink()
        base = self.newest
        if base and base.location.serial + 1 - self.fulls[-1] < self.full_every and base.file.header == file.header:
            return self.upload(store, version, file, base)
        return self.upload(store, version, file, None)

    def snapshot(self, store: ObjectStore) -> Publication:
        """Upload the newest version again, as a full snapshot: for engines that cannot use the stored one."""
        assert self.newest is not None
        return self.upload(store, self.newest.version, self.newest.file, None)

    def upload(self, store: ObjectStore, version: int, file: SafetensorsFile, base: Newest | None) -> Publication:
        """Upload the parts, then the manifest; then delete what has become superfluous."""
        location = self.first.at(self.newest.location.serial + 1 if self.newest else 1)

        def put(numbered: tuple[int, Sequence[Span]]) -> Part:
            return put_part(store, location.part_key(numbered[0]), numbered[1], file, base.file if base else None)

        with ThreadPoolExecutor(THREADS) as pool:
            parts = tuple(pool.map(put, enumerate(split(file.spans, PART_BYTES))))
        header = file.header[PREFIX_BYTES:].decode()
        manifest = WeightManifest(version, base.location.serial if base else None, header, len(file.data), parts)
        store.put_bytes(location.manifest_key, manifest.to_bytes())
        self.newest = Newest(version, location, file)
        if base is None:
            self.fulls.append(location.serial)
            self.delete_superfluous(store)
        update = WeightUpdate(version, store.uri(location.key), len(file.data))
        return Publication(update, {"sync/stored_bytes": float(manifest.stored_bytes), "sync/full": float(not base)})

    def delete_superfluous(self, store: ObjectStore) -> None:
        """Delete other attempts, and what is older than the full snapshot before the newest one.

        That one stays for an engine that still downloads it. A failure costs space and does not fail the run.
        """
        self.fulls = self.fulls[-2:]
        try:
            for location in locations(store, self.first.prefix):
                if location.attempt != self.first.attempt or location.serial < self.fulls[0]:
                    store.delete(location.manifest_key)
                    store.delete_prefix(location.key)
        except StoreError as error:
            LOG.warning("new weights are published, but older ones could not be deleted: %s", error)


def put_part(
    store: ObjectStore, key: str, spans: Sequence[Span], file: SafetensorsFile, base: SafetensorsFile | None
) -> Part:
    """Encode some tensors and upload them as one object; an empty object is left out."""
    encoded = [encode(file.tensor(s), base.tensor(s) if base else None, s.width) for s in spans]
    if data := b"".join(tensor.data for tensor in encoded):
        store.put_bytes(key, data)
    return tuple(
        StoredTensor(s.name, tensor.encoding, len(tensor.data), checksum(file.tensor(s).data))
        for s, tensor in zip(spans, encoded, strict=True)
    )


def split(spans: Sequence[Span], nbytes: int) -> Iterator[list[Span]]:
    """Runs of consecutive tensors of at most `nbytes`; a larger tensor is a run by itself."""
    part: list[Span] = []
    for span in spans:
        if part and span.stop - part[0].start > nbytes:
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def locations(store: ObjectStore, prefix: str) -> list[Location]:
    keys = {item.key.rpartition("/")[0] for item in store.list(prefix)}
    return [Location.parse(key) for key in sorted(keys)]
