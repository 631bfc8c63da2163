"""The objects by which an attempt at a run is followed and controlled from other machines.

runs/NAME/attempts/2/events/000000004096.jsonl      segments of growing files, by the offset of the first byte
runs/NAME/attempts/2/log/000000000000.txt
runs/NAME/attempts/2/stop.json                      asks the attempt to stop after the current step
runs/NAME/attempts/2/summary.json, evaluation.json  its results (`observe.report.Summary`); or failure.json
runs/NAME/attempts/2/verdict.txt                    why no other attempt follows
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidemill.errors import StoreError
from tidemill.store.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a run, counted from 1, and the keys of its objects."""

    run: str
    number: int

    @property
    def prefix(self) -> str:
        return f"runs/{self.run}/attempts/{self.number}"

    @property
    def events(self) -> str:
        return f"{self.prefix}/events"

    @property
    def log(self) -> str:
        return f"{self.prefix}/log"

    @property
    def stop(self) -> str:
        return f"{self.prefix}/stop.json"

    @property
    def summary(self) -> str:
        return f"{self.prefix}/summary.json"

    @property
    def evaluation(self) -> str:
        """`protocols.Evaluation` of the exported model, or `null` without held-out prompts."""
        return f"{self.prefix}/evaluation.json"

    @property
    def failure(self) -> str:
        return f"{self.prefix}/failure.json"

    @property
    def verdict(self) -> str:
        return f"{self.prefix}/verdict.txt"

    def ask_to_stop(self, store: ObjectStore, reason: str) -> None:
        store.put_bytes(self.stop, json.dumps({"reason": reason}).encode())

    def asked_to_stop(self, store: ObjectStore) -> str | None:
        """The reason of a request to stop, or None without one.

        Raises:
            StoreError: the store cannot be reached, or `ask_to_stop` did not write the object.
        """
        if not store.exists(self.stop):
            return None
        try:
            return str(json.loads(store.get_bytes(self.stop))["reason"])
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"{store.uri(self.stop)} is no request to stop: {error}") from error


def latest_attempt(store: ObjectStore, run: str) -> int:
    """Number of the newest attempt that left any object; 0 if there is none."""
    prefix = f"runs/{run}/attempts"
    numbers = sorted((int(name) for name in store.folders(prefix) if name.isdecimal()), reverse=True)
    return next((number for number in numbers if any(store.iterate(f"{prefix}/{number}"))), 0)
