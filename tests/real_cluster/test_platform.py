"""The manifests of k8s/ on a real cluster: they are valid, start, work, and refuse what they must refuse."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from cluster_rig import IMAGE
from minio import Minio
from minio.error import S3Error
from platform_rig import KEYS, READY_S, Platform, eventually, images_of_nodes, needed, new_platform, pod

from tidemill.store.object_store import ObjectStore

pytestmark = pytest.mark.cluster
PIPELINE = [
    ("create", "rayjobs.ray.io"),
    ("delete", "rayjobs.ray.io"),
    ("get", "rayjobs.ray.io"),
    ("list", "rayjobs.ray.io"),
    ("patch", "rayjobs.ray.io"),
    ("list", "pods"),
    ("get", "pods/log"),
    ("list", "events"),
    ("list", "nodes"),
    ("get", "workflows.argoproj.io"),
]
FORBIDDEN = [
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("create", "jobs.batch"),
    ("update", "deployments.apps"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("impersonate", "serviceaccounts"),
    ("create", "serviceaccounts/token"),
    ("delete", "namespaces"),
    ("delete", "nodes"),
]


@pytest.fixture(scope="module")
def applied() -> Iterator[Platform]:
    """The test overlay, applied; images of its pods may be missing."""
    if "KUBECONFIG" not in os.environ:
        pytest.skip("needs a cluster: KUBECONFIG")
    made = new_platform()
    try:
        made.apply("test")
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="module")
def platform(applied: Platform) -> Platform:
    """The test overlay with MinIO, its users and MLflow running."""
    missing = needed("test") - images_of_nodes()
    if missing:
        pytest.skip(f"the nodes lack {', '.join(sorted(missing))}: make images minio-image")
    applied.wait("deployment/minio")
    applied.wait("job/store-setup", "condition=complete")
    applied.wait("deployment/mlflow")
    return applied


def test_the_overlay_can_be_applied_again(applied: Platform) -> None:
    applied.apply("test", "--dry-run=server")


def test_the_seaweedfs_overlay_is_valid(applied: Platform) -> None:
    other = new_platform()
    try:
        other.apply("seaweedfs", "--dry-run=server")
    finally:
        other.remove()


@pytest.mark.parametrize(("verb", "resource"), PIPELINE)
def test_a_step_has_the_permissions_of_a_run(applied: Platform, verb: str, resource: str) -> None:
    assert applied.is_allowed("tidemill-pipeline", verb, resource)


@pytest.mark.parametrize(("verb", "resource"), FORBIDDEN)
@pytest.mark.parametrize("account", ["tidemill-pipeline", "tidemill-reaper", "tidemill-ray", "default"])
def test_no_account_has_more_permissions(applied: Platform, account: str, verb: str, resource: str) -> None:
    assert not applied.is_allowed(account, verb, resource)


def test_accounts_have_no_permission_in_another_namespace(applied: Platform) -> None:
    assert not applied.is_allowed("tidemill-pipeline", "list", "rayjobs.ray.io", "default")
    assert not applied.is_allowed("tidemill-reaper", "delete", "rayjobs.ray.io", "default")


def test_the_reaper_can_list_and_delete_but_not_create(applied: Platform) -> None:
    assert applied.is_allowed("tidemill-reaper", "list", "rayjobs.ray.io")
    assert applied.is_allowed("tidemill-reaper", "delete", "rayjobs.ray.io")
    assert not applied.is_allowed("tidemill-reaper", "create", "rayjobs.ray.io")


def test_ray_pods_have_no_permission_on_the_cluster(applied: Platform) -> None:
    assert not any(applied.is_allowed("tidemill-ray", verb, resource) for verb, resource in PIPELINE)


def test_a_step_in_a_profile_reads_the_secrets_of_kfp_and_no_other(applied: Platform) -> None:
    applied.apply("test", components=["profile"])
    secrets_of_kfp = ("mlpipeline-minio-artifact", "kfp-mlflow-credentials")
    assert all(applied.is_allowed("tidemill-pipeline", "get", "secrets", name=name) for name in secrets_of_kfp)
    assert applied.is_allowed("tidemill-pipeline", "create", "workflowtaskresults.argoproj.io")
    for name in ("", "tidemill-store", "tidemill-store-admin"):
        assert not applied.is_allowed("tidemill-pipeline", "get", "secrets", name=name)
    assert not applied.is_allowed("tidemill-pipeline", "list", "secrets", name=secrets_of_kfp[0])


def test_a_pod_as_root_is_refused(applied: Platform) -> None:
    rooted = pod("rooted", IMAGE, securityContext={"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}})
    refused = applied.kubectl("create", "-f", "-", stdin=rooted, check=False)
    assert refused.returncode != 0
    assert 'violates PodSecurity "restricted' in refused.stderr


def test_more_gpus_than_the_quota_are_refused(applied: Platform) -> None:
    many = {"resources": {"limits": {"nvidia.com/gpu": "9"}}}
    refused = applied.kubectl("create", "-f", "-", stdin=pod("greedy", IMAGE, container=many), check=False)
    assert refused.returncode != 0
    assert "exceeded quota: tidemill" in refused.stderr


def test_a_pod_of_ray_has_no_token(applied: Platform) -> None:
    sleeper = pod("tokenless", IMAGE, serviceAccountName="tidemill-ray")
    applied.kubectl("create", "-f", "-", stdin=sleeper)
    applied.wait("pod/tokenless", "condition=ready")
    seen = applied.kubectl("exec", "tokenless", "--", "ls", "/var/run/secrets", check=False)
    assert "kubernetes.io" not in seen.stdout
    applied.kubectl("delete", "pod", "tokenless")


def test_a_head_is_not_evicted(applied: Platform) -> None:
    head = pod("head", IMAGE, labels={"ray.io/node-type": "head"})
    applied.kubectl("create", "-f", "-", stdin=head)
    applied.wait("pod/head", "condition=ready")
    assert "disruption budget" in evict(applied, "head").stderr
    applied.kubectl("delete", "pod", "head")


def evict(platform: Platform, name: str) -> subprocess.CompletedProcess[str]:
    """Evict a pod as a drain does."""
    meta = {"name": name, "namespace": platform.namespace}
    eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
    path = f"/api/v1/namespaces/{platform.namespace}/pods/{name}/eviction"
    return platform.kubectl("create", "--raw", path, "-f", "-", stdin=eviction, check=False)


def test_a_head_that_is_not_ready_can_be_evicted(applied: Platform) -> None:
    probe = {"readinessProbe": {"exec": {"command": ["false"]}}}
    applied.kubectl("create", "-f", "-", stdin=pod("sick", IMAGE, labels={"ray.io/node-type": "head"}, container=probe))
    applied.wait("pod/sick", "jsonpath={.status.phase}=Running")
    assert evict(applied, "sick").returncode == 0


def test_a_step_cannot_change_scripts_that_run_with_keys(applied: Platform) -> None:
    [script] = [name for name in applied.kubectl("get", "configmap", "-o", "name").stdout.split() if "setup" in name]
    step = f"--as=system:serviceaccount:{applied.namespace}:tidemill-pipeline"
    refused = applied.kubectl("patch", script, step, "--type=merge", "-p", '{"data":{"setup.py":""}}', check=False)
    assert "field is immutable" in refused.stderr


def test_each_user_of_the_store_has_its_bucket_and_no_other(platform: Platform) -> None:
    user, key = KEYS["tidemill-store"]
    with platform.forwarded("store", 9000) as address:
        store = ObjectStore.connect(f"http://{address}", "tidemill", user, key)
        store.put_bytes("runs/a", b"content")
        assert store.get_bytes("runs/a") == b"content"
        with pytest.raises(S3Error) as refused:
            Minio(endpoint=address, access_key=user, secret_key=key, secure=False).stat_object(
                bucket_name="mlflow", object_name="any"
            )
        assert refused.value.code == "AccessDenied"


def test_mlflow_keeps_runs_and_puts_artifacts_into_its_bucket(platform: Platform) -> None:
    from mlflow import MlflowClient

    with platform.forwarded("mlflow", 5000) as address:
        client = MlflowClient(f"http://{address}")
        run = client.create_run(client.create_experiment("platform")).info.run_id
        client.log_metric(run, "reward", 0.5)
        client.log_text(run, "all well", "report.md")
        assert client.get_run(run).data.metrics == {"reward": 0.5}
    user, key = KEYS["tidemill-mlflow-store"]
    with platform.forwarded("store", 9000) as address:
        stored = ObjectStore.connect(f"http://{address}", "mlflow", user, key).list("")
    assert [item.key for item in stored if item.key.endswith(f"{run}/artifacts/report.md")] != []


def test_mlflow_keeps_its_data_when_its_pod_is_lost(platform: Platform) -> None:
    from mlflow import MlflowClient

    with platform.forwarded("mlflow", 5000) as address:
        MlflowClient(f"http://{address}").create_registered_model("kept")
    lost = ready(platform, "mlflow")
    platform.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=mlflow", "--force", "--grace-period=0")
    eventually("another MLflow", lambda: ready(platform, "mlflow") - lost, READY_S)  # the deployment notices later
    with platform.forwarded("mlflow", 5000) as address:
        assert MlflowClient(f"http://{address}").get_registered_model("kept").name == "kept"


def ready(platform: Platform, component: str) -> set[str]:
    """UIDs of the ready pods of a component."""
    chosen = f"app.kubernetes.io/component={component}"
    pods = json.loads(platform.kubectl("get", "pods", "-l", chosen, "-o", "json").stdout)["items"]
    return {
        each["metadata"]["uid"]
        for each in pods
        if {"Ready": "True"}.items() <= {c["type"]: c["status"] for c in each["status"].get("conditions", ())}.items()
    }


@pytest.mark.parametrize(
    ("host", "status"), [("mlflow:5000", 200), ("mlflow.tidemill.svc:5000", 200), ("mlflow.evil.example", 403)]
)
def test_mlflow_answers_to_its_own_host_names_only(platform: Platform, host: str, status: int) -> None:
    with platform.forwarded("mlflow", 5000) as address:
        request = urllib.request.Request(f"http://{address}/api/2.0/mlflow/experiments/search?max_results=1")
        request.add_header("Host", host)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == status
        except urllib.error.HTTPError as refused:
            assert refused.code == status


def test_the_reaper_job_completes(platform: Platform) -> None:
    platform.kubectl("create", "job", "reap-now", "--from=cronjob/tidemill-reaper")
    eventually("reaper", lambda: finished(platform, "reap-now"), 300)
    log = platform.kubectl("logs", "job/reap-now").stdout
    assert succeeded(platform, "reap-now"), log


def test_mlflow_with_accounts_requires_a_password(platform: Platform) -> None:
    login = {"password": "first 100% password", "session_key": secrets.token_hex(16)}
    values = [f"--from-literal={key}={value}" for key, value in login.items()]
    platform.kubectl("create", "secret", "generic", "tidemill-mlflow-accounts", *values)
    platform.apply("test", components=["mlflow-accounts"])
    platform.kubectl("rollout", "status", "deployment/mlflow", "--timeout=300s")
    with platform.forwarded("mlflow", 5000) as address:
        url = f"http://{address}/api/2.0/mlflow/registered-models/search"
        assert status(url) == 401
        assert status(url, "admin:a guess of mine") == 401
        assert status(url, f"admin:{login['password']}") == 200


def status(url: str, login: str | None = None) -> int:
    """Status of a server's answer to a request with a name and a password."""
    request = urllib.request.Request(url)
    if login is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def finished(platform: Platform, job: str) -> bool:
    return bool(platform.kubectl("get", "job", job, "-o", "jsonpath={.status.conditions[*].type}").stdout)


def succeeded(platform: Platform, job: str) -> bool:
    return platform.kubectl("get", "job", job, "-o", "jsonpath={.status.succeeded}").stdout == "1"
