"""Objects in an S3 bucket: MinIO, SeaweedFS, AWS, or the server that `store.server` starts.

Transfers stream in parts of 16 MiB, so that an object may be larger than memory, and are hashed on the way.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import MinioException, S3Error
from urllib3 import BaseHTTPResponse
from urllib3.connectionpool import ConnectionPool
from urllib3.exceptions import HTTPError, MaxRetryError, ReadTimeoutError

from tidemill.config.address import is_server
from tidemill.errors import ConfigError, StoreError, StoreMissingError, StoreRefusedError

PART_BYTES = 16 << 20
CHUNK_BYTES = 256 << 10  # with 1 MiB the allocator returns every chunk to the system, which doubles the time
READ_TIMEOUT_S = 60.0  # of silence; a server is silent while it joins the parts of an upload
ATTEMPTS = 4  # of a download that breaks off; each continues where the previous one stopped
SIGNED_FOR = timedelta(minutes=15)  # a conditional put
ACCESS_KEY, SECRET_KEY = "TIDEMILL_S3_ACCESS_KEY", "TIDEMILL_S3_SECRET_KEY"
REFUSED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecretKey"})
MISSING = frozenset({"NoSuchKey", "NoSuchBucket", "ResourceNotFound"})
SIGNATURE = re.compile(r"\?X-Amz-\S*")
"""The query of a signed URL, with which anybody may make the request until it expires."""
CONDITION_FAILED = frozenset({404, 409, 412})  # the object is gone, is written at this moment, or has changed


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A transferred object: `key`, size in bytes, and hexadecimal SHA-256 of its content."""

    key: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object as the server lists it: `key` and size in bytes."""

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TaggedContent:
    """The content of an object at one moment, and the entity tag that the server gave it.

    Servers derive the tag from the content: an object that returns to an earlier content has its earlier tag again.
    """

    data: bytes
    tag: str


class WithoutSignature(logging.Filter):
    """Removes the query of a signed URL from urllib3's messages, such as its warning before each retry."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(SIGNATURE.sub("", arg) if isinstance(arg, str) else arg for arg in record.args)
        return True


for logger in ("urllib3.connectionpool", "urllib3.util.retry"):
    logging.getLogger(logger).addFilter(WithoutSignature())


class Patience(urllib3.Retry):
    """Limits the attempts of a request.

    A request that fails at once, as while a server starts, is repeated until a restart is over. A request without an
    answer counts as three attempts, so that a server that hangs is reported before the deadlines of its callers, such
    as `sync.timeout_s`.
    """

    SILENCE = 3

    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: BaseHTTPResponse | None = None,
        error: Exception | None = None,
        _pool: ConnectionPool | None = None,
        _stacktrace: TracebackType | None = None,
    ) -> Self:
        left = super().increment(method, url, response, error, _pool, _stacktrace)
        if isinstance(error, ReadTimeoutError) and left.total is not None:
            left.total = max(0, left.total - (self.SILENCE - 1))
        return left


class HashingReader:
    """A file for `put_object`, hashed while it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


class ObjectStore:
    """One bucket of one server. Thread-safe; a prefix is always a folder: `runs/a` does not match `runs/ab/x`.

    Every method raises StoreError, naming object, endpoint, cause and fix, when the server cannot be reached, refuses,
    or does not have the object.
    """

    def __init__(self, client: Minio, endpoint: str, bucket: str) -> None:
        self.client, self.endpoint, self.bucket = client, endpoint, bucket

    @classmethod
    def connect(cls, endpoint_url: str, bucket: str, access_key: str, secret_key: str) -> ObjectStore:
        """Connect to a server and create the bucket if it does not exist; gives up after about 10 s."""
        probe = cls(make_client(endpoint_url, access_key, secret_key, patient=False), endpoint_url, bucket)
        with probe.explained(f"bucket {bucket}"):
            if not probe.client.bucket_exists(bucket_name=bucket):
                try:
                    probe.client.make_bucket(bucket_name=bucket)
                except S3Error:  # another process may have created it
                    if not probe.client.bucket_exists(bucket_name=bucket):
                        raise
        return cls(make_client(endpoint_url, access_key, secret_key, patient=True), endpoint_url, bucket)

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{key}"

    def put_file(self, key: str, path: Path) -> StoredObject:
        try:
            with path.open("rb") as file:
                return self.put_stream(key, file, path.stat().st_size)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path} to upload it to {self.uri(key)}: {error}") from error

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        """Upload `data`; readers see the old object or all of the new one."""
        return self.put_stream(key, io.BytesIO(data), len(data))

    def put_stream(self, key: str, file: BinaryIO, nbytes: int) -> StoredObject:
        reader = HashingReader(file)
        with self.explained(self.uri(key)):
            self.client.put_object(
                bucket_name=self.bucket, object_name=key, data=reader, length=nbytes, part_size=PART_BYTES
            )
        return StoredObject(key, nbytes, reader.digest.hexdigest())

    def read_tagged(self, key: str) -> TaggedContent | None:
        """A small object with its tag; None if it does not exist."""
        with self.explained(self.uri(key)):
            try:
                with self.opened(key) as response:
                    return TaggedContent(response.read(), str(response.headers["etag"]))
            except S3Error as error:
                if error.code in MISSING:
                    return None
                raise

    def put_if_unchanged(self, key: str, data: bytes, seen: TaggedContent | None) -> bool:
        """Replace the content that was seen, or create the object if `seen` is None: compare and swap.

        A put whose answer was lost is sent again and then finds its own content. A caller that must
        distinguish this from another writer reads the object after a False.

        Returns:
            False if the object has another content.
        """
        # `put_object` cannot send the header of a condition, but a signed URL takes it.
        condition = {"If-None-Match": "*"} if seen is None else {"If-Match": seen.tag}
        with self.explained(self.uri(key)), make_pool(patient=True) as pool:
            url = self.client.presigned_put_object(bucket_name=self.bucket, object_name=key, expires=SIGNED_FOR)
            response = pool.request("PUT", url, body=data, headers=condition)
        if response.status == 200:
            return True
        if response.status in CONDITION_FAILED:
            return False
        answer = response.data.decode(errors="replace")[:300]
        raise StoreError(f"{self.uri(key)} at {self.endpoint}: HTTP {response.status}: {answer}")

    def get_bytes(self, key: str) -> bytes:
        """The content of a small object."""
        buffer = io.BytesIO()
        self.receive(key, buffer)
        return buffer.getvalue()

    def get_file(self, key: str, path: Path) -> StoredObject:
        """Download to `path`, which appears only when it is complete; missing parents are created."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                stored = self.receive(key, file)
            part.replace(path)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot write {path} while downloading {self.uri(key)}: {error}. Free space or choose another folder."
            ) from error
        finally:
            with suppress(OSError):  # a second error of the file system would hide the first one
                part.unlink(missing_ok=True)
        return stored

    def receive(self, key: str, file: BinaryIO) -> StoredObject:
        """Write an object to `file`; continues after a broken connection."""
        received, digest = 0, hashlib.sha256()
        for attempt in range(ATTEMPTS):
            with self.explained(self.uri(key)), self.opened(key, received) as response:
                try:
                    for chunk in response.stream(CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        received += len(chunk)
                    return StoredObject(key, received, digest.hexdigest())
                except HTTPError:
                    if attempt == ATTEMPTS - 1:
                        raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextmanager
    def opened(self, key: str, offset: int = 0) -> Iterator[BaseHTTPResponse]:
        response = self.client.get_object(bucket_name=self.bucket, object_name=key, offset=offset)
        try:
            yield response
        finally:
            response.close()
            response.release_conn()

    def upload_folder(self, folder: Path, prefix: str) -> tuple[StoredObject, ...]:
        """Upload every file below `folder`, in the order of their names, as `prefix/relative/path`."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            raise StoreError(f"nothing to upload to {self.uri(prefix)}: {folder} has no files")
        return tuple(self.put_file(as_folder(prefix) + path.relative_to(folder).as_posix(), path) for path in files)

    def download_folder(self, prefix: str, folder: Path) -> tuple[StoredObject, ...]:
        """Download every object below `prefix` to its relative path in `folder`."""
        listed = self.list(prefix)
        if not listed:
            raise StoreError(f"{self.uri(prefix)} at {self.endpoint} does not exist: no object has this prefix")
        return tuple(self.get_file(item.key, folder / relative_path(item.key, prefix)) for item in listed)

    def list(self, prefix: str, after: str = "") -> tuple[ListedObject, ...]:
        """All objects below the folder `prefix` ("" is the whole bucket) with keys after `after`, ordered by key."""
        return tuple(sorted(self.iterate(prefix, after), key=lambda item: item.key))

    def iterate(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        """The objects of `list` in the order of the server, page by page."""
        where = {"prefix": as_folder(prefix), "start_after": after or None, "recursive": True}
        with self.explained(self.uri(prefix)):
            for item in self.client.list_objects(bucket_name=self.bucket, **where):
                if not item.is_dir:
                    yield ListedObject(item.object_name, item.size)

    def folders(self, prefix: str) -> tuple[str, ...]:
        """Names of the folders directly below the folder `prefix`.

        SeaweedFS also lists folders whose objects are deleted.
        """
        where = as_folder(prefix)
        with self.explained(self.uri(prefix)):
            found = self.client.list_objects(bucket_name=self.bucket, prefix=where)
            return tuple(item.object_name.removeprefix(where).rstrip("/") for item in found if item.is_dir)

    def exists(self, key: str) -> bool:
        """Whether an object has exactly this key."""
        with self.explained(self.uri(key)):
            try:
                self.client.stat_object(bucket_name=self.bucket, object_name=key)
            except S3Error as error:
                if error.code in MISSING:
                    return False
                raise
        return True

    def delete(self, key: str) -> None:
        with self.explained(self.uri(key)):
            self.client.remove_object(bucket_name=self.bucket, object_name=key)

    def delete_prefix(self, prefix: str) -> int:
        """Remove all objects below the folder `prefix`; returns their number."""
        if not prefix.strip("/"):
            raise StoreError(f"refusing to delete all of bucket {self.bucket}: name a prefix")
        doomed = [DeleteObject(item.key) for item in self.list(prefix)]
        with self.explained(self.uri(prefix)):
            for failure in self.client.remove_objects(bucket_name=self.bucket, delete_object_list=doomed):
                raise StoreError(f"cannot delete {self.uri(failure.name)} at {self.endpoint}: {failure.message}")
        return len(doomed)

    @contextmanager
    def explained(self, subject: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            raise explanation(error, f"{subject} at {self.endpoint}") from error
        except (MinioException, HTTPError) as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            raise StoreError(
                f"{subject}: no S3 answer from {self.endpoint}: {cause}. "
                "Check store.endpoint, and that the server runs and can be reached from here."
            ) from cause  # not from a MaxRetryError, whose text has the signed URL of a conditional put
        except ValueError as error:
            raise StoreError(f"{subject} at {self.endpoint}: {error}") from error


def explanation(error: S3Error, subject: str) -> StoreError:
    answer = f"{subject}: {error.code}: {error.message}"
    if error.code in REFUSED:
        return StoreRefusedError(
            f"{answer} Check the keys in {ACCESS_KEY} and {SECRET_KEY} (in pods: of kubernetes.store_secret), and "
            "their rights in this bucket."
        )
    if error.code in MISSING:
        return StoreMissingError(f"{answer} Check the name; it may have been deleted.")
    return StoreError(answer)


def make_client(
    endpoint_url: str, access_key: str, secret_key: str, *, patient: bool, read_timeout_s: float = READ_TIMEOUT_S
) -> Any:
    """A client whose waits are bounded; see `make_pool`."""
    secure, host = parse_endpoint(endpoint_url)
    pool = make_pool(patient=patient, read_timeout_s=read_timeout_s)
    return Minio(endpoint=host, access_key=access_key, secret_key=secret_key, secure=secure, http_client=pool)


def make_pool(*, patient: bool, read_timeout_s: float = READ_TIMEOUT_S) -> urllib3.PoolManager:
    """Connections that give up after about 10 s.

    Patient connections outlast the restart of a server: they give up after a minute, or after three minutes if the
    server accepts requests and does not answer.

    Args:
        patient: whether to outlast a restart.
        read_timeout_s: silence that counts as no answer, of patient connections.
    """
    # A starting MinIO asks to come back in a minute. Its own error says more than that of the retry.
    retries = Patience(6, backoff_factor=0.5, respect_retry_after_header=False, raise_on_status=False)
    if patient:
        retries.status_forcelist = {500, 502, 503, 504}
    else:
        retries.total = 1
    timeout = urllib3.Timeout(connect=4, read=read_timeout_s if patient else 5)
    return urllib3.PoolManager(maxsize=16, timeout=timeout, retries=retries, ca_certs=os.environ.get("SSL_CERT_FILE"))


def parse_endpoint(endpoint_url: str) -> tuple[bool, str]:
    """(TLS?, `host:port`) of an endpoint URL.

    Raises:
        StoreError: it is something else.
    """
    if not is_server(endpoint_url, bare=True):
        raise StoreError(f"endpoint {endpoint_url!r} is not an address of the form http(s)://host:port: fix it")
    url = urlsplit(endpoint_url)
    return url.scheme == "https", url.netloc


def parse_uri(uri: str) -> tuple[str, str]:
    """(bucket, key) of `s3://bucket/key`.

    Raises:
        StoreError: it is something else.
    """
    bucket, slash, key = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket or not slash or not key:
        raise StoreError(f"{uri!r} is not of the form s3://bucket/key: fix it")
    return bucket, key


def credentials() -> tuple[str, str]:
    """Access key and secret key from the environment.

    Raises:
        ConfigError: one of them is not set.
    """
    for name in (ACCESS_KEY, SECRET_KEY):
        if not os.environ.get(name):
            fix = (
                f"Export {name}. Only store.endpoint = embedded, on this machine, needs no keys. A step of a pipeline "
                "gets it from the secret that the parameter store_secret names, in the step's own namespace."
            )
            raise ConfigError(name, None, "the S3 key, in the environment", fix)
    return os.environ[ACCESS_KEY], os.environ[SECRET_KEY]


def as_folder(prefix: str) -> str:
    """`prefix` with exactly one slash at its end; "" stays."""
    return f"{prefix.strip('/')}/" if prefix.strip("/") else ""


def relative_path(key: str, prefix: str) -> PurePosixPath:
    """Path of `key` below `prefix`; a key that would leave the folder is refused."""
    path = PurePosixPath(key.removeprefix(as_folder(prefix)))
    if path.is_absolute() or ".." in path.parts:
        raise StoreError(f"object {key!r} would be written outside the folder: refused")
    return path
