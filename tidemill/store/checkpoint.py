"""Atomic commits of everything a restart needs.

    runs/NAME/checkpoints/00000020/manifest.json        written last: without it the commit does not exist
    runs/NAME/checkpoints/00000020/3f9a1c0e/...         its parts, in a new folder of every commit
    runs/NAME/model/20/...                              the published model

A crash at any moment leaves the previous commit, and also an earlier commit of the same version, intact: parts never
overwrite parts, and S3 replaces a manifest atomically.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.errors import CheckpointError, StoreError
from tidemill.store.download_once import remove_download
from tidemill.store.lease import Claim, Fence, reserve
from tidemill.store.object_store import ObjectStore, StoredObject, relative_path
from tidemill.store.server import open_store, store_folder

FORMAT = 1
"""Of the manifest."""
STATE = "state.json"
MANIFEST = "manifest.json"
STAGING = "staging-"
VERSION_FOLDER = re.compile(r"^(\d{8,})/")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a commit."""

    format: int  # of the manifest itself
    run: str  # name of the run
    version: int  # policy version
    folder: str  # key below which the parts lie
    parts: tuple[StoredObject, ...]  # name below `folder`, size in bytes and SHA-256 of each

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse the result of `to_json`.

        Raises:
            CheckpointError: it is not a manifest of this format.
        """
        try:
            tree = json.loads(data)
            if tree["format"] != FORMAT:
                raise CheckpointError(f"its format is {tree['format']!r} and this Tidemill reads {FORMAT}")
            parts = tuple(StoredObject(str(p["key"]), int(p["nbytes"]), str(p["sha256"])) for p in tree["parts"])
            return cls(FORMAT, str(tree["run"]), int(tree["version"]), str(tree["folder"]), parts)
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"its manifest is damaged ({error!r})") from error


class Checkpoints:
    """The commits of one run, of which the newest `keep` remain. With a claim, a commit requires the run's lease."""

    def __init__(self, store: ObjectStore, run_name: str, keep: int, claim: Claim | None = None) -> None:
        self.store, self.run_name, self.keep = store, run_name, keep
        self.fence = None if claim is None else Fence(store, run_name, claim)
        self.prefix = f"runs/{run_name}/checkpoints"

    def commit(self, version: int, folder: Path, state: Mapping[str, object]) -> str:
        """Store the files of `folder` and `state` (JSON values) as one commit; returns its URI.

        Commits of newer versions are removed: the run fell back to a version before them.

        Raises:
            StoreError: the store failed; the previous commit is intact.
            CheckpointError: `state` is not JSON, the folder has a file named as that of the state, or a newer attempt
                holds the lease.
        """
        self.check_lease()
        encoded = encode_state(state)
        if (folder / STATE).exists():
            raise CheckpointError(f"{folder / STATE} has the name of the file of the run's state: rename it")
        place = f"{self.commit_prefix(version)}/{secrets.token_hex(4)}"
        stored = [*self.store.upload_folder(folder, place), self.store.put_bytes(f"{place}/{STATE}", encoded)]
        parts = tuple(StoredObject(str(relative_path(s.key, place)), s.nbytes, s.sha256) for s in stored)
        manifest = Manifest(FORMAT, self.run_name, version, place, parts)
        self.check_lease()  # again, because the upload takes long
        self.store.put_bytes(self.manifest_key(version), manifest.to_json())
        self.delete_replaced(manifest)
        return self.store.uri(self.commit_prefix(version))

    def check_lease(self) -> None:
        """Refuse an attempt that a newer one has replaced.

        The lease may still be lost before the next write: that commit is complete, and the newer attempt removes it.
        """
        if self.fence is not None:
            self.fence.check()

    def load(self, version: int, folder: Path) -> dict[str, Any]:
        """Download the parts of a commit into `folder`, verified; returns the state.

        Raises:
            CheckpointError: the commit does not exist, or a part is missing or damaged. No part remains in `folder`.
        """
        manifest = self.complete_manifest(version)
        written: list[Path] = []
        try:
            for part in manifest.parts:
                path = folder / relative_path(part.key, "")
                written.append(path)
                key = f"{manifest.folder}/{part.key}"
                check_same(part, self.store.get_file(key, path), self.store.uri(key))
            path = folder / STATE
            return self.parse_state(manifest, path.read_bytes() if path.exists() else b"")
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise

    def newest_valid(self, *, tensors: bool = True) -> tuple[int, dict[str, Any]] | None:
        """State of the newest intact commit, with a warning for each damaged one; None without any commit.

        Every byte is read and none is stored: the caller may have no room for the tensors, or no use for them.

        Args:
            tensors: whether to verify the tensors too, and not the state alone.

        Returns:
            (version, state).

        Raises:
            CheckpointError: there are commits, and none is intact. A silent start from the beginning would be worse.
        """
        versions = self.versions()
        for version in versions:
            try:
                return version, self.verify(version, tensors=tensors)
            except CheckpointError as error:
                log.warning("%s; falling back to the commit before it", error)
        if not versions:
            return None
        raise CheckpointError(
            f"none of the checkpoints {versions} below {self.store.uri(self.prefix)} is intact: "
            "restore the bucket, or start over under another run name"
        )

    def verify(self, version: int, *, tensors: bool) -> dict[str, Any]:
        """Verify the checksums of all parts of a commit, or of its state alone; returns the state."""
        manifest, state = self.complete_manifest(version), io.BytesIO()
        with open(os.devnull, "wb") as nowhere:
            for part in (part for part in manifest.parts if tensors or part.key == STATE):
                key = f"{manifest.folder}/{part.key}"
                received = self.store.receive(key, state if part.key == STATE else nowhere)
                check_same(part, received, self.store.uri(key))
        return self.parse_state(manifest, state.getvalue())

    def publish_model(self, version: int, folder: Path) -> str:
        """Upload a Hugging Face folder, replacing an earlier upload of this version; returns its URI.

        Every file is replaced as a whole, so that a registered version stays usable even if the upload breaks off.
        """
        self.check_lease()
        prefix = f"runs/{self.run_name}/model/{version}"
        uploaded = {stored.key for stored in self.store.upload_folder(folder, prefix)}
        for item in self.store.list(prefix):
            if item.key not in uploaded:
                self.store.delete(item.key)
        return self.store.uri(prefix)

    def versions(self) -> list[int]:
        """Versions with a manifest, readable or not, newest first."""
        keys = {item.key for item in self.store.list(self.prefix)}
        return sorted((v for v in self.folders(keys) if self.manifest_key(v) in keys), reverse=True)

    def manifest(self, version: int) -> Manifest:
        key = self.manifest_key(version)
        if not self.store.exists(key):
            raise CheckpointError(f"there is no checkpoint {self.store.uri(self.commit_prefix(version))}")
        try:
            manifest = Manifest.from_json(self.store.get_bytes(key))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {self.store.uri(key)} cannot be used: {error}") from error
        if (manifest.run, manifest.version) != (self.run_name, version):
            raise CheckpointError(f"checkpoint {self.store.uri(key)} is of {manifest.run} version {manifest.version}")
        return manifest

    def complete_manifest(self, version: int) -> Manifest:
        """The manifest of a commit, after a check of the existence and size of all parts, before any download."""
        manifest = self.manifest(version)
        sizes = {item.key: item.nbytes for item in self.store.list(manifest.folder)}
        for part in manifest.parts:
            key = f"{manifest.folder}/{part.key}"
            if key not in sizes:
                raise CheckpointError(f"checkpoint part {self.store.uri(key)} is missing")
            if sizes[key] != part.nbytes:
                raise CheckpointError(
                    f"checkpoint part {self.store.uri(key)} has {sizes[key]} bytes, committed were {part.nbytes}"
                )
        return manifest

    def parse_state(self, manifest: Manifest, data: bytes) -> dict[str, Any]:
        if not data:
            raise CheckpointError(f"checkpoint {self.store.uri(manifest.folder)} has no {STATE}")
        state: dict[str, Any] = json.loads(data)
        return state

    def delete_replaced(self, current: Manifest) -> None:
        """Delete the commits that `current` replaces: manifests first, then parts.

        A failure costs space and does not end the run.
        """
        try:
            keys = [item.key for item in self.store.list(self.prefix)]
            folders = self.folders(keys)
            older = [v for v in folders if v < current.version and self.manifest_key(v) in keys]
            stay = {current.version, *sorted(older, reverse=True)[: self.keep - 1]}
            for version in sorted(folders - stay):
                self.store.delete(self.manifest_key(version))
                self.store.delete_prefix(self.commit_prefix(version))
            for key in filter(lambda key: self.is_left_over(key, current), keys):
                self.store.delete(key)
        except StoreError as error:
            log.warning("checkpoint %d is committed, but older ones could not be deleted: %s", current.version, error)

    def is_left_over(self, key: str, current: Manifest) -> bool:
        mine = key.startswith(f"{self.commit_prefix(current.version)}/")
        kept = key.startswith(f"{current.folder}/") or key == self.manifest_key(current.version)
        return mine and not kept

    def folders(self, keys: list[str] | set[str]) -> set[int]:
        """Versions with any object."""
        matches = (VERSION_FOLDER.match(key.removeprefix(f"{self.prefix}/")) for key in keys)
        return {int(match[1]) for match in matches if match}

    def commit_prefix(self, version: int) -> str:
        return f"{self.prefix}/{version:08d}"

    def manifest_key(self, version: int) -> str:
        """Key of the manifest, whose existence makes the commit."""
        return f"{self.commit_prefix(version)}/{MANIFEST}"


def take_name(config: RunConfig) -> bool:
    """Take the name of a new run, also against other machines that share the store; returns whether it was free.

    A name is not free if a run of this name has checkpoints, because the new run would resume them.

    Raises:
        StoreError: the store cannot be reached.
    """
    embedded = config.store.endpoint == "embedded"
    if embedded and not store_folder(config.output).is_dir():
        return True
    with open_checkpoints(config) as checkpoints:
        return not checkpoints.versions() and (embedded or reserve(checkpoints.store, config.name))


def restored_folder(config: RunConfig) -> Path:
    """The downloaded checkpoint while the trainers of a pod load it; see `download_once`."""
    return config.folder / "restored"


def staging_folder(config: RunConfig, rank: int) -> Path:
    """Where a trainer rank writes a checkpoint before the upload; not in /tmp, because it is huge."""
    return config.folder / f"{STAGING}{rank}"


def remove_partial_transfers(config: RunConfig) -> None:
    """Remove the partial downloads and uploads of checkpoints that failed or killed trainers left."""
    remove_download(restored_folder(config))
    for folder in config.folder.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def encode_state(state: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state of a checkpoint must be JSON values: {error}") from error


@contextmanager
def open_checkpoints(config: RunConfig, claim: Claim | None = None) -> Iterator[Checkpoints]:
    with open_store(config.store, config.output) as store:
        yield Checkpoints(store, config.name, config.checkpoint.keep, claim)


def check_same(part: StoredObject, got: StoredObject, uri: str) -> None:
    if (got.nbytes, got.sha256) != (part.nbytes, part.sha256):
        raise CheckpointError(
            f"checkpoint part {uri} is damaged: {got.nbytes} bytes with SHA-256 {got.sha256}, "
            f"committed were {part.nbytes} with {part.sha256}"
        )
