import errno
import hashlib
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from urllib3.exceptions import MaxRetryError, ProtocolError, ReadTimeoutError

from tidemill.config.asynchrony import SyncConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.retry import wait_for
from tidemill.store.object_store import READ_TIMEOUT_S, ObjectStore, credentials, make_client, make_pool, parse_uri

Server = tuple[str, str, str]
MIB = 1 << 20


def test_bytes_come_back_as_they_were(store: ObjectStore) -> None:
    stored = store.put_bytes("a/b", b"tide")
    assert stored.sha256 == hashlib.sha256(b"tide").hexdigest()
    assert store.get_bytes("a/b") == b"tide"
    assert store.exists("a/b")
    assert not store.exists("a")


def test_an_empty_object_is_an_object(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes("empty", b"")
    assert store.get_file("empty", tmp_path / "empty").nbytes == 0
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_file_of_several_parts_comes_back_with_its_checksum(store: ObjectStore, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 37
    (tmp_path / "up").write_bytes(data)
    up = store.put_file("big", tmp_path / "up")
    down = store.get_file("big", tmp_path / "new" / "down")
    assert up == down
    assert up.sha256 == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "new" / "down").read_bytes() == data


def test_a_folder_keeps_its_shape(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "top").write_bytes(b"1")
    (source / "deep" / "er" / "leaf").write_bytes(b"2")
    store.upload_folder(source, "x/y/")
    store.put_bytes("x/yz", b"not in the folder x/y")
    store.download_folder("x/y", target)
    files = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert files == {"top": b"1", "deep/er/leaf": b"2"}


def test_a_prefix_is_a_folder(store: ObjectStore) -> None:
    for key in ("runs/a/1", "runs/a/2", "runs/ab/3"):
        store.put_bytes(key, b"x")
    assert [item.key for item in store.list("runs/a")] == ["runs/a/1", "runs/a/2"]
    assert store.delete_prefix("runs/a") == 2
    assert [(item.key, item.nbytes) for item in store.list("")] == [("runs/ab/3", 1)]


def test_more_objects_than_one_page_are_listed_and_deleted(store: ObjectStore) -> None:
    threads = [
        threading.Thread(target=lambda t=t: [store.put_bytes(f"many/{t}/{n:03d}", b"") for n in range(253)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.list("many")) == 1012
    assert store.delete_prefix("many") == 1012
    assert store.list("many") == ()


def test_deleting_everything_by_mistake_is_refused(store: ObjectStore) -> None:
    with pytest.raises(StoreError, match="name a prefix"):
        store.delete_prefix("/")


def test_a_missing_object_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"s3://{store.bucket}/no/such at http"):
        store.get_file("no/such", tmp_path / "x")
    with pytest.raises(StoreError, match="no/such"):
        store.get_bytes("no/such")
    with pytest.raises(StoreError, match="does not exist"):
        store.download_folder("no/such", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_conditional_put_replaces_only_the_content_that_was_seen(store: ObjectStore) -> None:
    key = "runs/a/lease"
    assert store.read_tagged(key) is None
    assert store.put_if_unchanged(key, b"one", None)
    first = store.read_tagged(key)
    assert first is not None and first.data == b"one"
    assert not store.put_if_unchanged(key, b"two", None)
    assert store.put_if_unchanged(key, b"two", first)
    assert not store.put_if_unchanged(key, b"three", first)
    store.delete(key)
    assert not store.put_if_unchanged(key, b"three", first)
    assert not store.exists(key)


def test_one_of_many_concurrent_conditional_puts_wins(store: ObjectStore) -> None:
    key = "runs/a/lease"
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: store.put_if_unchanged(key, f"{n}".encode(), None), range(16))) == 1
    seen = store.read_tagged(key)
    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(lambda n: store.put_if_unchanged(key, f"next {n}".encode(), seen), range(16))) == 1


def test_an_overwritten_object_is_the_new_one(store: ObjectStore) -> None:
    store.put_bytes("k", b"old and long")
    store.put_bytes("k", b"new")
    assert store.get_bytes("k") == b"new"


def test_a_missing_object_may_be_deleted(store: ObjectStore) -> None:
    store.delete("never/was")
    assert store.delete_prefix("never") == 0


def test_a_wrong_key_says_which_variables_to_check(server: Server) -> None:
    with pytest.raises(StoreError, match="TIDEMILL_S3_ACCESS_KEY"):
        ObjectStore.connect(server[0], "tidemill", server[1], "wrong-secret-key")
    with pytest.raises(StoreError, match=server[0]):
        ObjectStore.connect(server[0], "tidemill", "nobody", server[2])


def test_two_clients_may_make_the_bucket_at_once(server: Server) -> None:
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            ObjectStore.connect(server[0], "race-for-it", *server[1:]).put_bytes(threading.current_thread().name, b"")
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=connect) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_full_disk_names_the_file_and_leaves_nothing(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    seaweedfs.put_bytes("k", b"data")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "file"
    (tmp_path / f".file.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)) as caught:
        seaweedfs.get_file("k", path)
    assert str(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_named(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="gone"):
        seaweedfs.put_file("k", tmp_path / "gone")


def test_a_key_cannot_leave_the_folder(seaweedfs: ObjectStore, tmp_path: Path) -> None:
    class Evil(ObjectStore):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
            return (type(seaweedfs.list("x")[0])("x/../../evil", 1),)

    seaweedfs.put_bytes("x/y", b"")
    with pytest.raises(StoreError, match="outside"):
        Evil(seaweedfs.client, seaweedfs.endpoint, seaweedfs.bucket).download_folder("x", tmp_path / "inner")


def test_an_endpoint_where_nobody_listens_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreError, match=f"{url}.*refused.*store.endpoint"):
            ObjectStore.connect(url, "tidemill", "key", "secret")


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:9000", "http://", "http://h:99999", "http://h/path", ""])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="http"):
        ObjectStore.connect(url, "tidemill", "key", "secret")


@contextmanager
def flaky_proxy(target: str, budgets: list[int]) -> Iterator[str]:
    """Forwards connections, and cuts the answer of the n-th one after `budgets[n]` bytes."""
    host, port = target.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(300)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            budget = budgets.pop(0) if budgets else 1 << 40
            threading.Thread(target=pump, args=(client, budget), daemon=True).start()

    def pump(client: socket.socket, budget: int) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            threading.Thread(target=copy, args=(client, server, 1 << 40), daemon=True).start()
            copy(server, client, budget)

    def copy(source: socket.socket, sink: socket.socket, budget: int) -> None:
        try:
            while budget > 0 and (data := source.recv(min(65536, budget))):
                sink.sendall(data)
                budget -= len(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_broken_download_resumes(seaweedfs: ObjectStore, seaweedfs_server: Server, tmp_path: Path) -> None:
    data = os.urandom(MIB) * 8
    stored = seaweedfs.put_bytes("big", data)
    with flaky_proxy(seaweedfs_server[0], [1 << 40, 3 * MIB, 2 * MIB]) as url:
        store = ObjectStore.connect(url, seaweedfs.bucket, *seaweedfs_server[1:])
        assert store.get_file("big", tmp_path / "big") == stored
    assert (tmp_path / "big").read_bytes() == data


@contextmanager
def silent_server(heard: list[bytes]) -> Iterator[str]:
    """Accepts requests and answers none."""
    listener, taken = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            taken.append(client)
            heard.append(client.recv(65536))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for client in taken:
            client.close()


def test_a_server_that_never_answers_is_asked_three_times() -> None:
    heard: list[bytes] = []
    with silent_server(heard) as url:
        store = ObjectStore(make_client(url, "key", "secret", patient=True, read_timeout_s=0.2), url, "tidemill")
        with pytest.raises(StoreError, match=f"no S3 answer from {url}: .*timed out"):
            store.exists("k")
        wait_for(lambda: len(heard) >= 3, 60, 0.01)  # the server may be slower than the client
    assert len(heard) == 3


def test_a_hanging_server_is_reported_before_a_sync_times_out() -> None:
    pool = make_pool(patient=True)
    retries, silent, waited = pool.connection_pool_kw["retries"], ReadTimeoutError(pool, "/", "silence"), 0.0
    with pytest.raises(MaxRetryError):
        while True:
            waited += pool.connection_pool_kw["timeout"].connect_timeout + READ_TIMEOUT_S
            retries = retries.increment("GET", "/", error=silent)
            waited += retries.get_backoff_time()
    assert waited < SyncConfig().timeout_s


def test_a_server_that_breaks_off_is_tried_as_often_as_a_restart_takes() -> None:
    retries = make_pool(patient=True).connection_pool_kw["retries"]
    waited = 0.0
    with pytest.raises(MaxRetryError):
        while True:
            retries = retries.increment("GET", "/", error=ProtocolError("reset"))
            waited += retries.get_backoff_time()
    assert len(retries.history) == 6 and waited > 30


def test_the_signature_of_a_conditional_put_is_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody who has it may make the request until it expires."""
    url = "http://127.0.0.1:1"
    store = ObjectStore(make_client(url, "key", "secret", patient=False), url, "tidemill")
    signed = f"{url}/tidemill/runs/r/lease?X-Amz-Credential=key%2F2026&X-Amz-Signature=abc"
    with (
        caplog.at_level("DEBUG"),
        pytest.raises(StoreError, match=r"no S3 answer .* Connection refused") as caught,
        store.explained("lease"),
    ):
        make_pool(patient=False).request("PUT", signed, body=b"")
    assert "Retrying" in caplog.text and "/tidemill/runs/r/lease" in caplog.text
    assert "X-Amz" not in caplog.text + "".join(traceback.format_exception(caught.value))


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", "a")
    monkeypatch.delenv("TIDEMILL_S3_SECRET_KEY", raising=False)
    with pytest.raises(ConfigError, match="TIDEMILL_S3_SECRET_KEY"):
        credentials()
    monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", "b")
    assert credentials() == ("a", "b")


def test_uris_name_bucket_and_key(seaweedfs: ObjectStore) -> None:
    assert parse_uri(seaweedfs.uri("a/b c")) == (seaweedfs.bucket, "a/b c")
    for bad in ("s3://", "s3://bucket", "s3:///key", "http://b/k", "s3://bucket/"):
        with pytest.raises(StoreError, match="s3://bucket/key"):
            parse_uri(bad)
