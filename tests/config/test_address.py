from __future__ import annotations

import pytest
from config_rig import ON_KUBERNETES, parse, refusal

ADDRESSES = {
    "tracking.uri": [
        "foo",
        "localhost:5000",
        "mlruns",
        "./mlruns",
        "file:///mlruns",
        "s3://bucket/mlflow",
        "htp://mlflow:5000",
        "http://",
        "http:mlflow",
        "http://mlflow:5000o",
        "http://mlflow:99999",
        "'http://ml flow'",
        "sqlite://",
        "sqlite:///",
        "databricks://",
        "'databricks:team'",
        "postgres://db/mlflow",
    ],
    "store.endpoint": [
        "foo",
        "minio:9000",
        "s3://bucket",
        "http://minio:9000/tidemill",
        "http://key:secret@minio:9000",
        "http://minio:0",
        "embeded",
        "''",
    ],
    "model": ["s3://", "s3://bucket", "s3://bucket/", "s3:/bucket/prefix", "'s3:///prefix'"],
    "kubernetes.pages.ray": ["ray:8265", "javascript:alert(1)", "''"],
}


@pytest.mark.parametrize(("key", "address"), [(key, each) for key, found in ADDRESSES.items() for each in found])
def test_a_malformed_address_is_refused_before_anything_starts(key: str, address: str) -> None:
    assert refusal(*ON_KUBERNETES, f"{key}={address}").key == key
    if not key.startswith("kubernetes"):
        assert refusal(f"{key}={address}").key == key


@pytest.mark.parametrize(
    "address",
    [
        "http://mlflow",
        "https://mlflow.example.org/team/",
        "http://[::1]:5000",
        "sqlite:///runs/my run/mlflow.db",
        "mysql+pymysql://user@db/mlflow",
        "databricks",
    ],
)
def test_every_address_that_mlflow_can_track_to_is_accepted(address: str) -> None:
    assert parse(f"tracking.uri={address}").tracking.uri == address


@pytest.mark.parametrize(
    "address",
    [
        "http://me:abracadabra@mlflow:5000",
        "https://:abracadabra@mlflow/team",
        "htp://me:abracadabra@mlflow",
        "postgresql://me:abracadabra@db/mlflow",
        "mysql+pymysql://me:abra@cadabra@db/mlflow",
        "postgresql://me@db/mlflow?sslmode=require&password=abracadabra",
    ],
)
def test_a_password_in_an_address_is_refused_without_being_shown(address: str) -> None:
    for key in ("tracking.uri", "kubernetes.pages.mlflow"):
        error = refusal(*ON_KUBERNETES, f"{key}={address}")
        assert error.key == key
        assert "(not shown)" in str(error)
        assert "cadabra" not in str(error)


@pytest.mark.parametrize("key", ["data.train", "data.held_out"])
def test_the_token_of_a_data_set_is_refused_without_being_shown(key: str) -> None:
    error = refusal(f"{key}=hf://me/data:train?name=main&token=abracadabra")
    assert (error.key, "abracadabra" in str(error), "HF_TOKEN" in str(error)) == (key, False, True)
    parse(f"{key}=hf://me/tokens:train?name=token")


@pytest.mark.parametrize("address", ["sqlite:///runs/a:b@c.db", "https://mlflow:5000/a:b@c", "http://me@mlflow"])
def test_an_address_without_a_password_is_accepted_with_any_path(address: str) -> None:
    assert parse(f"tracking.uri={address}").tracking.uri == address


def test_keys_in_the_address_of_the_store_are_refused_without_being_shown() -> None:
    message = str(refusal("store.endpoint=http://me:abracadabra@minio:9000"))
    assert "http://(not shown)@minio:9000" in message
    assert "abracadabra" not in message
