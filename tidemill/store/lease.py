"""The lease of a run: only its holder, the newest attempt, may write checkpoints.

    runs/NAME/lease     {"attempt": 2, "owner": "9f2c...", "time": 1764.., "released": false}

A pod that seemed lost may continue to run. It finds the number of a newer attempt in the lease, and its
commits are refused. The lease remains after its release, because it stores the number; `remove_lease` removes it. Two
machines that share a store are kept apart in the same way.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from tidemill.errors import CheckpointError, RunError, StoreError
from tidemill.store.object_store import ObjectStore, TaggedContent

log = logging.getLogger(__name__)
TRIES = 10  # of a change, each lost to another process that changes the lease at the same time


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt's claim to a run, which is passed to the process that commits."""

    attempt: int  # counted from 1
    owner: str  # identifies the process among several of one attempt, as after a cluster was suspended and resumed


@dataclass(frozen=True, slots=True)
class Lease:
    """The content of the lease.

    Attributes:
        attempt, owner: of the claim that holds or held it.
        time: when it was taken or released, in seconds since 1970.
        released: whether its owner has released it.
    """

    attempt: int
    owner: str
    time: float
    released: bool = False

    @classmethod
    def parse(cls, data: bytes, uri: str) -> Lease:
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{uri} is no lease of a run: {error}. Delete it once no attempt is left") from error

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_of(self, claim: Claim) -> bool:
        return (self.attempt, self.owner) == (claim.attempt, claim.owner) and not self.released


@dataclass(frozen=True, slots=True)
class Fence:
    """Refuses attempts that do not hold the lease of a run. All methods raise StoreError if the store fails."""

    store: ObjectStore
    run: str
    claim: Claim

    @property
    def uri(self) -> str:
        return self.store.uri(lease_key(self.run))

    def read(self) -> tuple[Lease | None, TaggedContent | None]:
        """The lease, and its content for a conditional put; None if it does not exist."""
        seen = self.store.read_tagged(lease_key(self.run))
        return (None if seen is None else Lease.parse(seen.data, self.uri)), seen

    def write(self, lease: Lease, seen: TaggedContent | None) -> bool:
        return self.store.put_if_unchanged(lease_key(self.run), lease.to_bytes(), seen)

    def check(self) -> None:
        """Refuse an attempt that no longer holds the lease."""
        lease, _ = self.read()
        if lease is None or not lease.is_of(self.claim):
            raise CheckpointError(f"attempt {self.claim.attempt} of {self.run} may not commit: {held(lease)}")

    def take(self) -> None:
        """Take the lease, also from its holder: among processes with the same number the last one gets it.

        Raises:
            RunError: a newer attempt holds or held it.
        """
        for _ in range(TRIES):
            lease, seen = self.read()
            if lease is not None and lease.is_of(self.claim):
                return
            if lease is not None and lease.attempt > self.claim.attempt:
                raise RunError(f"attempt {self.claim.attempt} of {self.run} may not start: {held(lease)} ({self.uri})")
            if self.write(Lease(self.claim.attempt, self.claim.owner, time.time()), seen):
                return
        raise RunError(f"{self.uri} was changed by others {TRIES} times in a row: check which processes run {self.run}")

    def release(self) -> None:
        """Release the lease, if the claim still holds it."""
        lease, seen = self.read()
        if lease is not None and lease.is_of(self.claim):
            self.write(replace(lease, time=time.time(), released=True), seen)


def held(lease: Lease | None) -> str:
    if lease is None:
        return "its lease was removed"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.time))
    did = "released the lease" if lease.released else "took the lease"
    return f"attempt {lease.attempt} {did} at {when}"


def next_claim(store: ObjectStore, run: str) -> Claim:
    """A claim newer than all earlier ones, for attempts that are not numbered otherwise."""
    claim = Claim(0, secrets.token_hex(8))
    lease, _ = Fence(store, run, claim).read()
    return replace(claim, attempt=1 if lease is None else lease.attempt + 1)


def reserve(store: ObjectStore, run: str) -> bool:
    """Create a lease without a holder, so that no other machine starts a new run of this name.

    Returns:
        Whether there was none.

    Raises:
        RunError: the store neither has a lease nor accepts one.
        StoreError: the store cannot be reached.
    """
    key, lease = lease_key(run), Lease(0, secrets.token_hex(8), time.time(), released=True).to_bytes()
    for _ in range(TRIES):
        if store.put_if_unchanged(key, lease, None):
            return True
        if (seen := store.read_tagged(key)) is not None:
            return seen.data == lease  # a put whose answer was lost is sent again and finds its own content
    raise RunError(f"{store.uri(key)} cannot be created: does {store.endpoint} support a put with If-None-Match?")


def lease_key(run: str) -> str:
    return f"runs/{run}/lease"


def remove_lease(store: ObjectStore, run: str) -> None:
    store.delete(lease_key(run))


@contextmanager
def leased(store: ObjectStore, run: str, claim: Claim) -> Iterator[Fence]:
    """Hold the lease of a run during the body; see `Fence.take`."""
    fence = Fence(store, run, claim)
    fence.take()
    try:
        yield fence
    finally:
        try:
            fence.release()
        except StoreError as error:  # the next attempt can take it, and the error of the body matters more
            log.warning("%s was not released: %s", fence.uri, error)
