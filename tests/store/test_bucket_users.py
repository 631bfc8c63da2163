"""The script that creates buckets and their users, against a real MinIO."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from minio import Minio
from minio.error import S3Error

from tidemill.store.object_store import ObjectStore

SCRIPT = Path(__file__).parents[2] / "k8s" / "base" / "store" / "setup.py"
KEYS = {
    "TIDEMILL_ACCESS_KEY": "runs",
    "TIDEMILL_SECRET_KEY": "secret-of-the-runs",
    "MLFLOW_ACCESS_KEY": "tracking",
    "MLFLOW_SECRET_KEY": "secret-of-tracking",
}


@pytest.fixture
def endpoint(minio_server: tuple[str, str, str]) -> str:
    """A server after two runs of the script."""
    url, access, secret = minio_server
    address = url.removeprefix("http://")
    script, env = runpy.run_path(str(SCRIPT)), KEYS | {"ADMIN_ACCESS_KEY": access, "ADMIN_SECRET_KEY": secret}
    for _ in range(2):
        script["make_buckets"](address, env)
        script["make_users"](address, env)
    return address


def test_a_user_has_the_rights_of_a_run_in_its_bucket(endpoint: str) -> None:
    store = ObjectStore.connect(f"http://{endpoint}", "tidemill", "runs", "secret-of-the-runs")
    store.put_bytes("a/b", b"content")
    assert store.get_bytes("a/b") == b"content"
    assert [item.key for item in store.list("a/")] == ["a/b"]
    store.delete_prefix("a/")
    assert list(store.list("a/")) == []


@pytest.mark.parametrize(
    "attempt",
    [
        lambda client: list(client.list_objects(bucket_name="mlflow")),
        lambda client: client.remove_bucket(bucket_name="tidemill"),
        lambda client: client.make_bucket(bucket_name="another"),
    ],
)
def test_a_user_has_no_other_rights(endpoint: str, attempt: Callable[[Minio], object]) -> None:
    client = Minio(endpoint=endpoint, access_key="runs", secret_key="secret-of-the-runs", secure=False)
    with pytest.raises(S3Error) as refused:
        attempt(client)
    assert refused.value.code == "AccessDenied"
