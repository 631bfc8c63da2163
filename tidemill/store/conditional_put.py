"""A small object that only who has seen its present state may change: compare and set on S3's conditional put.

The `minio` client cannot send the headers of a condition (`metadata=` drops them in silence), so the put goes through a
URL that it signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from minio.error import S3Error

from tidemill.errors import StoreError
from tidemill.store.object_store import MISSING, ObjectStore

SIGNED_FOR = timedelta(minutes=15)
REFUSED = frozenset({404, 409, 412})
"""Answers to a put whose condition does not hold: it is gone, someone writes just now, or it has changed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A state of a record: its content, and the tag that the server gave it.

    Servers make the tag of the content, so that a state which comes back cannot be told from the first one.
    """

    data: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Record:
    """The object `key`. Its methods raise StoreError as those of `ObjectStore` do."""

    store: ObjectStore
    key: str

    def read(self) -> Seen | None:
        """Content and tag of one moment; None where there is no such object."""
        store = self.store
        with store.explained(store.uri(self.key)):
            try:
                response = store.client.get_object(bucket_name=store.bucket, object_name=self.key)
            except S3Error as error:
                if error.code in MISSING:
                    return None
                raise
            try:
                return Seen(response.read(), str(response.headers["etag"]))
            finally:
                response.close()
                response.release_conn()

    def write(self, data: bytes, seen: Seen | None) -> bool:
        """Put `data` in the place of what was seen, or of nothing; False where something else is there now.

        A put whose answer was lost is sent again, and then finds its own content in its place: who needs to know reads
        the record after a False.
        """
        store = self.store
        condition = {"If-None-Match": "*"} if seen is None else {"If-Match": seen.tag}
        with store.explained(store.uri(self.key)):
            url = store.client.presigned_put_object(bucket_name=store.bucket, object_name=self.key, expires=SIGNED_FOR)
            response = store.client._http.urlopen("PUT", url, body=data, headers=condition)
        if response.status == 200:
            return True
        if response.status in REFUSED:
            return False
        said = response.data.decode(errors="replace")[:300]
        raise StoreError(f"{store.uri(self.key)} at {store.endpoint}: HTTP {response.status}: {said}")
