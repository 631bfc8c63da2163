"""Models in the object store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig
from tidemill.errors import RETRYABLE, DataError, ModelError, StoreError
from tidemill.models.locate import Locator, model_here
from tidemill.store.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore


@pytest.fixture
def locator(
    weed: ObjectStore, weed_server: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Locator:
    endpoint, access_key, secret_key = weed_server
    monkeypatch.setenv(ACCESS_KEY, access_key)
    monkeypatch.setenv(SECRET_KEY, secret_key)
    return Locator(StoreConfig(endpoint=endpoint, bucket=weed.bucket), tmp_path, f"sqlite:///{tmp_path}/never.db")


def test_a_model_of_the_store_is_brought_whole(weed: ObjectStore, locator: Locator, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        weed.put_bytes(f"models/a/{name}", name.encode())
    found = locator.bring(weed.uri("models/a"), tmp_path / "start")
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        name: name.encode() for name in ("config.json", "model.safetensors", "tokenizer.json")
    }


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://{bucket}/no/such", "model 's3://{bucket}/no/such' does not exist: no object of http"),
        ("s3://{bucket}", "model 's3://{bucket}': .* is not of the form s3://bucket/key"),
    ],
)
def test_another_try_is_not_worth_it_for_a_model_that_the_store_does_not_have(
    weed: ObjectStore, locator: Locator, tmp_path: Path, address: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message.format(bucket=weed.bucket)) as caught:
        locator.bring(address.format(bucket=weed.bucket), tmp_path / "start")
    assert not isinstance(caught.value, RETRYABLE)


def test_another_try_is_worth_it_when_the_store_does_not_answer(locator: Locator, tmp_path: Path) -> None:
    silent = Locator(locator.store.model_copy(update={"endpoint": "http://127.0.0.1:9"}), tmp_path, locator.registry)
    with pytest.raises(StoreError) as caught:
        silent.bring("s3://bucket/model", tmp_path / "start")
    assert isinstance(caught.value, RETRYABLE)


def test_a_file_of_the_store_is_brought(weed: ObjectStore, locator: Locator, tmp_path: Path) -> None:
    weed.put_bytes("data/train.jsonl", b"{}")
    locator.fetch_file(weed.uri("data/train.jsonl"), tmp_path / "train.jsonl")
    assert (tmp_path / "train.jsonl").read_bytes() == b"{}"


@pytest.mark.parametrize("uri", ["s3://{bucket}/data/none.jsonl", "s3://no-such-bucket/train.jsonl", "s3://{bucket}"])
def test_a_file_that_the_store_does_not_have_is_named(
    weed: ObjectStore, locator: Locator, tmp_path: Path, uri: str
) -> None:
    uri = uri.format(bucket=weed.bucket)
    with pytest.raises(DataError, match=uri):
        locator.fetch_file(uri, tmp_path / "train.jsonl")
    assert not weed.client.bucket_exists(bucket_name="no-such-bucket")


def test_actors_of_a_pod_bring_the_model_once(
    weed: ObjectStore, locator: Locator, run_config: RunConfig, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        weed.put_bytes(f"models/a/{name}", name.encode())
    config = run_config.model_copy(update={"model": weed.uri("models/a"), "store": locator.store})
    with ThreadPoolExecutor(4) as pod:
        paths = {found.path for found in pod.map(model_here, [config] * 4)}
    assert paths == {config.folder / "start"}
    brought = (config.folder / "start" / "config.json").stat()
    weed.delete_prefix("models/a")
    assert model_here(config).path.joinpath("config.json").stat() == brought
    (config.folder / "start.name").unlink()  # as when bringing it was cut off
    with pytest.raises(ModelError, match="does not exist"):
        model_here(config)
