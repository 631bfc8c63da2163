"""The trainer's end of the object store: a version goes up as a full snapshot or as what changed since the last one."""

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
from tidemill.weights.manifest import Part, Place, StoredTensor, WeightManifest
from tidemill.weights.outbox import Publication
from tidemill.weights.weight_file import PREFIX_BYTES, Span, WeightFile

PART_BYTES = 32 << 20  # of tensors, before they are encoded; a larger tensor goes alone
THREADS = 4  # zstd, xor, checksums and the network all leave the interpreter to others

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Newest:
    """What the store has, and the base of the next delta."""

    version: int
    place: Place
    file: WeightFile


class WeightPublisher:
    """Publishes the weights of one attempt at a run; blocking, one call at a time.

    Args:
        prefix: key below which the weights of the run lie.
        full_every: a full snapshot every so many publications, deltas in between.
    """

    def __init__(self, prefix: str, full_every: int) -> None:
        self.first, self.full_every = Place(prefix, secrets.token_hex(4), 0), full_every
        self.newest: Newest | None = None
        self.fulls: list[int] = []

    @property
    def nbytes(self) -> int:
        """Size of the newest export, which the next one will have too; 0 before the first."""
        return len(self.newest.file.data) if self.newest else 0

    def publish(self, store: ObjectStore, version: int, path: Path) -> Publication:
        """Upload an exported file; its name is gone afterwards, and its memory when the next version is published.

        Raises:
            StoreError: the store failed; the version does not exist and the one before it is intact.
            SyncError: this is no safetensors file.
        """
        file = WeightFile.open(path)
        path.unlink()
        base = self.newest
        if base and base.place.serial + 1 - self.fulls[-1] < self.full_every and base.file.header == file.header:
            return self.upload(store, version, file, base)
        return self.upload(store, version, file, None)

    def snapshot(self, store: ObjectStore) -> Publication:
        """Upload the newest version again, as a full snapshot: for receivers that cannot use what is stored of it.

        Raises:
            StoreError: as in `publish`.
        """
        assert self.newest is not None
        return self.upload(store, self.newest.version, self.newest.file, None)

    def upload(self, store: ObjectStore, version: int, file: WeightFile, base: Newest | None) -> Publication:
        """Parts, then the manifest, then what has become superfluous."""
        place = self.first.at(self.newest.place.serial + 1 if self.newest else 1)

        def put(numbered: tuple[int, Sequence[Span]]) -> Part:
            return put_part(store, place.part_key(numbered[0]), numbered[1], file, base.file if base else None)

        with ThreadPoolExecutor(THREADS) as pool:
            parts = tuple(pool.map(put, enumerate(split(file.spans, PART_BYTES))))
        header = file.header[PREFIX_BYTES:].decode()
        manifest = WeightManifest(version, base.place.serial if base else None, header, len(file.data), parts)
        store.put_bytes(place.manifest_key, manifest.to_bytes())
        self.newest = Newest(version, place, file)
        if base is None:
            self.fulls.append(place.serial)
            self.retire(store)
        update = WeightUpdate(version, store.uri(place.key), len(file.data))
        return Publication(update, {"sync/stored_bytes": float(manifest.stored_bytes), "sync/full": float(not base)})

    def retire(self, store: ObjectStore) -> None:
        """Delete other attempts, and what is older than the full snapshot before the newest one.

        The one before stays for an engine that is still on its way from there. A failure here costs space and not the
        run.
        """
        self.fulls = self.fulls[-2:]
        try:
            for place in places(store, self.first.prefix):
                if place.attempt != self.first.attempt or place.serial < self.fulls[0]:
                    store.delete(place.manifest_key)
                    store.delete_prefix(place.key)
        except StoreError as error:
            log.warning("new weights are published, but older ones could not be deleted: %s", error)


def put_part(store: ObjectStore, key: str, spans: Sequence[Span], file: WeightFile, base: WeightFile | None) -> Part:
    """Encode some tensors and upload them as one object; one without bytes is left out."""
    encoded = [encode(file.tensor(s), base.tensor(s) if base else None, s.width) for s in spans]
    if data := b"".join(tensor.data for tensor in encoded):
        store.put_bytes(key, data)
    return tuple(
        StoredTensor(s.name, tensor.encoding, len(tensor.data), checksum(file.tensor(s).data))
        for s, tensor in zip(spans, encoded, strict=True)
    )


def split(spans: Sequence[Span], nbytes: int) -> Iterator[list[Span]]:
    """Consecutive tensors of together at most `nbytes`; a larger one goes alone."""
    part: list[Span] = []
    for span in spans:
        if part and span.stop - part[0].start > nbytes:
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def places(store: ObjectStore, prefix: str) -> list[Place]:
    """Every publication that has any object, oldest first."""
    keys = {item.key.rpartition("/")[0] for item in store.list(prefix)}
    return [Place.parse(key) for key in sorted(keys)]
