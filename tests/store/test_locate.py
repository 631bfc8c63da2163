"""Models in the object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.errors import ModelError, StoreError
from tidemill.failure import PASSING
from tidemill.sections import StoreConfig
from tidemill.store.locate import Locator
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
    assert not isinstance(caught.value, PASSING)


def test_another_try_is_worth_it_when_the_store_does_not_answer(locator: Locator, tmp_path: Path) -> None:
    silent = Locator(locator.store.model_copy(update={"endpoint": "http://127.0.0.1:9"}), tmp_path, locator.registry)
    with pytest.raises(StoreError) as caught:
        silent.bring("s3://bucket/model", tmp_path / "start")
    assert isinstance(caught.value, PASSING)
