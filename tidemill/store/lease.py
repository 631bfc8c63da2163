"""Who may write the checkpoints of a run: one attempt at a time, the newest.

    runs/NAME/lease     {"attempt": 2, "owner": "9f2c...", "time": 1764.., "released": false}

A pod that was believed lost may wake up and go on for a while. It finds the number of a newer attempt in the lease, and
its commits are refused. The lease stays after its release, so that the number is not forgotten; `remove_lease` ends it.
The same keeps two machines apart that share a store.
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
from tidemill.store.conditional_put import Record, Seen
from tidemill.store.object_store import ObjectStore

log = logging.getLogger(__name__)
TRIES = 10  # of a change, each lost to another process that changed the lease at the same moment


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt's claim on a run; crosses to the process that commits.

    Attributes:
        attempt: counted from 1.
        owner: of this process, so that two of the same attempt are told apart, such as those of a cluster that was
            suspended and made again.
    """

    attempt: int
    owner: str


@dataclass(frozen=True, slots=True)
class Lease:
    """What stands in the store.

    Attributes:
        attempt, owner: of the claim.
        time: when it was taken or released, in seconds since 1970.
        released: whether its owner has ended in order.
    """

    attempt: int
    owner: str
    time: float
    released: bool = False

    @classmethod
    def parse(cls, seen: Seen, where: str) -> Lease:
        """Read what `to_bytes` made.

        Raises:
            StoreError: it is something else.
        """
        try:
            return cls(**json.loads(seen.data))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{where} is no lease of a run: {error}. Delete it once no attempt is left") from error

    def to_bytes(self) -> bytes:
        """As it is stored."""
        return json.dumps(asdict(self)).encode()

    def is_of(self, claim: Claim) -> bool:
        """Whether the claim holds it."""
        return (self.attempt, self.owner) == (claim.attempt, claim.owner) and not self.released


@dataclass(frozen=True, slots=True)
class Fence:
    """Lets through only who holds the lease of a run."""

    store: ObjectStore
    run: str
    claim: Claim

    @property
    def record(self) -> Record:
        """The lease as an object."""
        return Record(self.store, lease_key(self.run))

    @property
    def uri(self) -> str:
        """Of the lease."""
        return self.store.uri(lease_key(self.run))

    def check(self) -> None:
        """Refuse whoever does not hold the lease any more.

        Raises:
            CheckpointError: naming the attempt that holds it now.
            StoreError: the store cannot be reached.
        """
        seen = self.record.read()
        lease = None if seen is None else Lease.parse(seen, self.uri)
        if lease is None or not lease.is_of(self.claim):
            raise CheckpointError(f"attempt {self.claim.attempt} of {self.run} commits nothing any more: {held(lease)}")

    def take(self) -> None:
        """Take the lease, also from who has it: of several with the same number the last one to come goes on.

        Raises:
            RunError: a newer attempt has or had it.
            StoreError: the store cannot be reached.
        """
        for _ in range(TRIES):
            seen = self.record.read()
            lease = None if seen is None else Lease.parse(seen, self.uri)
            if lease is not None and lease.is_of(self.claim):
                return
            if lease is not None and lease.attempt > self.claim.attempt:
                raise RunError(f"attempt {self.claim.attempt} of {self.run} does not begin: {held(lease)} ({self.uri})")
            if self.record.write(Lease(self.claim.attempt, self.claim.owner, time.time()).to_bytes(), seen):
                return
        raise RunError(f"{self.uri} changes so often that it cannot be taken: look who else runs {self.run}")

    def release(self) -> None:
        """Give the lease back, if it is ours still.

        Raises:
            StoreError: the store cannot be reached.
        """
        seen = self.record.read()
        lease = None if seen is None else Lease.parse(seen, self.uri)
        if lease is not None and lease.is_of(self.claim):
            self.record.write(replace(lease, time=time.time(), released=True).to_bytes(), seen)


def held(lease: Lease | None) -> str:
    """Whose a lease is, in words."""
    if lease is None:
        return "its lease was removed"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.time))
    did = "gave the lease back" if lease.released else "took the lease"
    return f"attempt {lease.attempt} {did} at {when}"


def next_claim(store: ObjectStore, run: str) -> Claim:
    """A claim that goes before all there were, for attempts that nobody counts."""
    fence = Fence(store, run, Claim(0, secrets.token_hex(8)))
    seen = fence.record.read()
    return replace(fence.claim, attempt=1 if seen is None else Lease.parse(seen, fence.uri).attempt + 1)


def reserve(store: ObjectStore, run: str) -> bool:
    """Leave a lease that nobody holds, so that no other machine begins a new run under this name.

    Returns:
        Whether there was none.

    Raises:
        RunError: the store neither has one nor takes one.
        StoreError: the store cannot be reached.
    """
    record, lease = Record(store, lease_key(run)), Lease(0, secrets.token_hex(8), time.time(), released=True).to_bytes()
    for _ in range(TRIES):
        if record.write(lease, None):
            return True
        if (seen := record.read()) is not None:
            return seen.data == lease  # where an answer was lost, it was sent again and found itself
    said = f"{store.uri(record.key)} is not there and cannot be made"
    raise RunError(f"{said}: does {store.endpoint} know the condition If-None-Match of a put?")


def lease_key(run: str) -> str:
    """Where the lease of a run lies."""
    return f"runs/{run}/lease"


def remove_lease(store: ObjectStore, run: str) -> None:
    """End the lease, whoever has it; one that is not there is fine."""
    store.delete(lease_key(run))


@contextmanager
def leased(store: ObjectStore, run: str, claim: Claim) -> Iterator[Fence]:
    """Hold the lease of a run for the time of the body; see `Fence.take`."""
    fence = Fence(store, run, claim)
    fence.take()
    try:
        yield fence
    finally:
        try:
            fence.release()
        except StoreError as error:  # the next attempt takes it over all the same, and why this one ended says more
            log.warning("%s was not given back: %s", fence.uri, error)
