"""What an attempt at a run leaves in the store, for whoever watches from elsewhere.

runs/NAME/attempts/2/events/000000004096.jsonl      segments of growing files, by the offset of their first byte
runs/NAME/attempts/2/log/000000000000.txt
runs/NAME/attempts/2/stop.json                      asks it to end after the step under way
runs/NAME/attempts/2/summary.json, evaluation.json  how it ended; or failure.json
runs/NAME/attempts/2/verdict.txt                    why no other attempt follows
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tidemill.errors import StoreError
from tidemill.store.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a run, counted from 1."""

    run: str
    number: int

    @property
    def prefix(self) -> str:
        """Key below which everything lies."""
        return f"runs/{self.run}/attempts/{self.number}"

    @property
    def events(self) -> str:
        """Folder of the segments of `events.jsonl`."""
        return f"{self.prefix}/events"

    @property
    def log(self) -> str:
        """Folder of the segments of `log.txt`."""
        return f"{self.prefix}/log"

    @property
    def stop(self) -> str:
        """Object that asks the attempt to end."""
        return f"{self.prefix}/stop.json"

    @property
    def summary(self) -> str:
        """`observe.report.Summary`, once the training is over."""
        return f"{self.prefix}/summary.json"

    @property
    def evaluation(self) -> str:
        """`protocols.Evaluation` of the exported model, or `null` without held-out prompts."""
        return f"{self.prefix}/evaluation.json"

    @property
    def failure(self) -> str:
        """`failure.Failure`, where the attempt failed."""
        return f"{self.prefix}/failure.json"

    @property
    def verdict(self) -> str:
        """Why no attempt follows this one, in words, where its watcher has decided that."""
        return f"{self.prefix}/verdict.txt"

    def ask_to_stop(self, store: ObjectStore, reason: str) -> None:
        """Have the attempt end after the step under way."""
        store.put_bytes(self.stop, json.dumps({"reason": reason}).encode())

    def asked_to_stop(self, store: ObjectStore) -> str | None:
        """Why it is to end, or None while nobody asked.

        Raises:
            StoreError: the store cannot be reached, or the object is not what `ask_to_stop` writes.
        """
        if not store.exists(self.stop):
            return None
        try:
            return str(json.loads(store.get_bytes(self.stop))["reason"])
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"{store.uri(self.stop)} is no request to stop: {error}") from error


def newest_attempt(store: ObjectStore, run: str) -> int:
    """Number of the newest attempt that left anything; 0 without any."""
    prefix = f"runs/{run}/attempts/"
    with store.explained(store.uri(prefix)):
        folders = [item.object_name for item in store.client.list_objects(bucket_name=store.bucket, prefix=prefix)]
        names = (folder.removeprefix(prefix).rstrip("/") for folder in folders)
        numbers = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
        return next((number for number in numbers if has_objects(store, f"{prefix}{number}/")), 0)


def has_objects(store: ObjectStore, prefix: str) -> bool:
    """Whether anything lies there: SeaweedFS lists folders whose objects are deleted."""
    found = store.client.list_objects(bucket_name=store.bucket, prefix=prefix, recursive=True)
    return any(not item.is_dir for item in found)
