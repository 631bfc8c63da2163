"""A server does not start with empty keys, as in a template that was not filled in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from kustomize_rig import K8S, of_kind

NAMES = [f"{user}_{what}_KEY" for user in ("ADMIN", "TIDEMILL", "MLFLOW") for what in ("ACCESS", "SECRET")]
KEYS = {name: f"key/of+{name.lower()}=" for name in NAMES}
LOGIN = {"ADMIN_PASSWORD": 'a 100% "long" $password', "MLFLOW_FLASK_SERVER_SECRET_KEY": "0123456789"}
OWNER = {"MINIO_ROOT_USER": "owner", "MINIO_ROOT_PASSWORD": "of the store"}


def run(command: list[str], env: Mapping[str, str], programs: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a manifest with fake servers that print their arguments."""
    for name in ("minio", "mlflow"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(command, env={"PATH": path, **env}, capture_output=True, text=True, timeout=300, check=False)


def minio() -> list[str]:
    [tree] = [m.tree for m in of_kind("Deployment") if m.tree["metadata"]["name"] == "minio"]
    [container] = tree["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def script(name: str, folder: str, place: Path) -> list[str]:
    """A script of a component, writing to a folder of the test."""
    text = (K8S / "components" / name).read_text(encoding="utf-8").replace(folder, f"{place}/")
    (place / "script.sh").write_text(text)
    return ["sh", str(place / "script.sh"), "--port=5000"]


def test_minio_starts_with_the_keys_of_its_owner(tmp_path: Path) -> None:
    done = run(minio(), OWNER, tmp_path)
    assert done.stdout.splitlines() == ["server", "/data", "--address=:9000", "--console-address=:9001"]


@pytest.mark.parametrize("name", OWNER)
def test_minio_does_not_start_without_a_key(tmp_path: Path, name: str) -> None:
    done = run(minio(), OWNER | {name: ""}, tmp_path)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert f"{name}: is empty" in done.stderr


@pytest.mark.parametrize("name", ["TIDEMILL_ACCESS_KEY", "MLFLOW_ACCESS_KEY"])
def test_users_of_the_store_have_different_access_keys(tmp_path: Path, name: str) -> None:
    twice = KEYS | {name: KEYS["ADMIN_ACCESS_KEY"]}
    setup = [sys.executable, str(K8S / "base" / "store" / "setup.py"), "127.0.0.1:9", "--buckets-only"]
    done = run(setup, twice, tmp_path)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "the secrets of the store have the same access_key: give each its own, see k8s/secrets",
    )


def test_seaweedfs_has_the_users_of_the_secrets(tmp_path: Path) -> None:
    command = script("seaweedfs/accounts.sh", "/accounts/", tmp_path)
    assert run(command, KEYS, tmp_path).stderr == ""
    users = {each["name"]: each for each in json.loads((tmp_path / "s3.json").read_text())["identities"]}
    assert set(users) == {"admin", "tidemill", "mlflow"}
    key = {"accessKey": KEYS["MLFLOW_ACCESS_KEY"], "secretKey": KEYS["MLFLOW_SECRET_KEY"]}
    assert users["mlflow"]["credentials"] == [key]
    assert {action.partition(":")[2] for action in users["mlflow"]["actions"]} == {"mlflow"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", 'x","actions":["Admin"]', "line\nbreak"])
def test_seaweedfs_does_not_start_with_an_invalid_key(tmp_path: Path, name: str, value: str) -> None:
    done = run(script("seaweedfs/accounts.sh", "/accounts/", tmp_path), KEYS | {name: value}, tmp_path)
    assert done.returncode == 1
    assert "a key of the store is empty, or has more than letters" in done.stderr
    assert not (tmp_path / "s3.json").exists()


def test_mlflow_starts_with_its_first_password(tmp_path: Path) -> None:
    command = script("mlflow-accounts/start.sh", "/none/", tmp_path)
    done = run(command, LOGIN | {"MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini")}, tmp_path)
    assert done.stdout.splitlines() == ["server", "--app-name", "basic-auth", "--port=5000"]
    assert 'admin_password = a 100%% "long" $password\n' in (tmp_path / "auth.ini").read_text()


@pytest.mark.parametrize("name", LOGIN)
def test_mlflow_does_not_start_without_a_password(tmp_path: Path, name: str) -> None:
    settings = LOGIN | {"MLFLOW_AUTH_CONFIG_PATH": str(tmp_path / "auth.ini"), name: ""}
    done = run(script("mlflow-accounts/start.sh", "/none/", tmp_path), settings, tmp_path)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert f"{name}: is empty" in done.stderr
