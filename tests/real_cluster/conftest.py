"""Fixtures of the tests on a real cluster: a namespace, service accounts, and a store that pods can reach.

The cluster of KUBECONFIG needs KubeRay and the image of `make test-image`. If pods cannot reach this machine at the
address of its node, set TIDEMILL_TEST_ADDRESS.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_rig import NAMESPACES, SERVICE_ACCOUNTS, ClusterRun, with_token

from tidemill.errors import StoreError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import NODES, SECRETS, Kind
from tidemill.retry import retrying
from tidemill.store.object_store import ObjectStore
from tidemill.store.seaweedfs import choose_ports, find_binary

ROOT = Path(__file__).parents[2]
ROLES = Kind("rbac.authorization.k8s.io", "v1", "roles")
BINDINGS = Kind("rbac.authorization.k8s.io", "v1", "rolebindings")
KINDS = {"ServiceAccount": SERVICE_ACCOUNTS, "Role": ROLES, "RoleBinding": BINDINGS}


@pytest.fixture(scope="session")
def admin() -> Iterator[KubernetesCluster]:
    """The administrator, in a namespace that is deleted at the end."""
    if "KUBECONFIG" not in os.environ:
        pytest.skip("needs a cluster: KUBECONFIG")
    cluster = KubernetesCluster.connect(f"tidemill-test-{secrets.token_hex(3)}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.create(NAMESPACES, {"metadata": {"name": cluster.namespace, "labels": labels}})
    for document in yaml.safe_load_all((ROOT / "k8s/base/accounts.yaml").read_text()):
        if document["kind"] in KINDS:
            cluster.create(KINDS[document["kind"]], document)
    yield cluster
    cluster.delete(NAMESPACES, cluster.namespace)


@pytest.fixture(scope="session")
def steps(admin: KubernetesCluster) -> KubernetesCluster:
    """The cluster with the permissions of a pipeline step."""
    return with_token(admin, "tidemill-pipeline")


@pytest.fixture(scope="session")
def reaper(admin: KubernetesCluster) -> KubernetesCluster:
    """The cluster with the permissions of the reaper."""
    return with_token(admin, "tidemill-reaper")


@pytest.fixture(scope="session")
def store(admin: KubernetesCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server on this machine, with its keys in the secret of the runs."""
    folder, address = tmp_path_factory.mktemp("seaweedfs"), address_for_pods(admin)
    keys = secrets.token_hex(8), secrets.token_hex(16)
    credentials = [{"accessKey": keys[0], "secretKey": keys[1]}]
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": ["Admin"]}]})
    )
    ports = choose_ports()
    flags = ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")
    command = [find_binary(), "mini", f"-dir={folder}", f"-ip={address}", "-ip.bind=0.0.0.0"]
    command += [f"-{flag}={port}" for flag, port in zip(flags, ports, strict=True)]
    command += ["-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, f"-s3.config={folder / 's3.json'}"], stdout=log, stderr=log)
    secret = {"metadata": {"name": "tidemill-store"}, "stringData": {"access_key": keys[0], "secret_key": keys[1]}}
    admin.create(SECRETS, secret)
    os.environ.update(TIDEMILL_S3_ACCESS_KEY=keys[0], TIDEMILL_S3_SECRET_KEY=keys[1])
    try:
        yield connected(f"http://{address}:{ports[0]}", keys)
    finally:
        server.terminate()
        server.wait(60)


def address_for_pods(admin: KubernetesCluster) -> str:
    """An address of this machine that pods can reach."""
    named = os.environ.get("TIDEMILL_TEST_ADDRESS")
    if named:
        return named
    addresses = [a["address"] for a in admin.list(NODES)[0]["status"]["addresses"] if a["type"] == "InternalIP"]
    try:
        with socket.socket() as probe:
            probe.bind((addresses[0], 0))
    except OSError:
        pytest.skip("pods do not reach this machine as their node: name an address in TIDEMILL_TEST_ADDRESS")
    return str(addresses[0])


def connected(endpoint: str, keys: tuple[str, str]) -> ObjectStore:
    return retrying(StoreError, 120, 0.2)(ObjectStore.connect, endpoint, "tidemill", *keys)


@pytest.fixture
def run(admin: KubernetesCluster, steps: KubernetesCluster, store: ObjectStore, tmp_path: Path) -> Iterator[ClusterRun]:
    """A run of one trainer rank and one engine; it is deleted at the end."""
    run = ClusterRun(admin, steps, store, tmp_path)
    yield run
    run.clear()
