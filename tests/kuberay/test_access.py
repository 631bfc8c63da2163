from __future__ import annotations

from collections.abc import Collection

import pytest
import yaml
from fake_cluster import FakeClock, FakeCluster
from manifest_rig import ROOT, on_kubernetes

from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, ConfigError
from tidemill.kuberay.access import LOGS, PERMISSIONS, check_access
from tidemill.kuberay.cluster import NODES, RAY_JOBS, SECRETS, WORKFLOWS, Kind, Object, name_of

KEYS = {"access_key": "YQ==", "secret_key": "Yg=="}
GPU = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
WITHOUT_LOOKS = (("get", SECRETS), ("list", NODES))


def cluster(
    *, secrets: dict[str, dict[str, str]] | None = None, forbidden: Collection[tuple[str, Kind]] = (), **more: object
) -> FakeCluster:
    """A cluster with the store's keys, one node with eight GPUs and one without GPUs."""
    found = FakeCluster(FakeClock(), forbidden=forbidden, **more)  # type: ignore[arg-type]
    for name, data in (secrets if secrets is not None else {"tidemill-store": KEYS}).items():
        found.objects[SECRETS, name] = {"metadata": {"name": name}, "data": data}
    for name, labels, gpus in (("gpu-1", GPU, {"nvidia.com/gpu": "8"}), ("cpu-1", {"pool": "cpu"}, {})):
        node = {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"cpu": "64", **gpus}}}
        found.objects[NODES, name] = node
    return found


def refused(config: RunConfig, found: FakeCluster) -> str:
    """The error about a run that does not fit the cluster."""
    with pytest.raises((ConfigError, ClusterError)) as caught:
        check_access(config, found)
    assert found.created == []
    return str(caught.value)


def test_a_run_that_fits_passes_and_creates_nothing() -> None:
    found = cluster()
    check_access(on_kubernetes("kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3", "rollout.tensor_parallel_size=8"), found)
    assert found.created == []


def test_all_missing_permissions_are_named_in_one_error() -> None:
    said = refused(on_kubernetes(), cluster(forbidden=[("create", RAY_JOBS), ("delete", RAY_JOBS), ("get", LOGS)]))
    assert "no permission in namespace tidemill to create, delete rayjobs.ray.io; get pods/log. " in said


@pytest.mark.parametrize(("verb", "kind"), [(verb, kind) for kind, verbs in PERMISSIONS for verb in verbs])
def test_each_permission_of_a_run_is_checked(verb: str, kind: Kind) -> None:
    assert f"{verb} {kind}" in refused(on_kubernetes(), cluster(forbidden=[(verb, kind)]))


def test_a_cluster_without_kuberay_is_refused() -> None:
    said = refused(on_kubernetes(), cluster(missing=[RAY_JOBS]))
    assert said == "the cluster knows no rayjobs.ray.io: install the KubeRay operator"


@pytest.mark.parametrize(
    ("secrets", "setting", "message"),
    [
        ({}, "name=a", "kubernetes.store_secret = 'tidemill-store'. Allowed: a secret of namespace tidemill"),
        (
            {"tidemill-store": {"access_key": "YQ=="}},
            "name=a",
            "kubernetes.store_secret = 'tidemill-store'. Allowed: a secret with access_key and secret_key. Add "
            "secret_key",
        ),
        ({"tidemill-store": KEYS}, "kubernetes.secrets=[hub]", "kubernetes.secrets = 'hub'"),
        ({"tidemill-store": KEYS}, "kubernetes.image_pull_secrets=[hub]", "kubernetes.image_pull_secrets = 'hub'"),
    ],
)
def test_a_missing_or_incomplete_secret_is_named(
    secrets: dict[str, dict[str, str]], setting: str, message: str
) -> None:
    assert refused(on_kubernetes(setting), cluster(secrets=secrets)).startswith(message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kubernetes.gpu_type=B200", "kubernetes.gpu_type = 'B200'. Allowed: a GPU that some node has: NVIDIA-H100"),
        ("kubernetes.node_selector={pool: gpu}", "kubernetes.node_selector = {pool: 'gpu'}. Allowed: labels of"),
        ("rollout.tensor_parallel_size=16", "rollout.tensor_parallel_size = 16. Allowed: no more than"),
        ("kubernetes.node_selector={pool: cpu}", "trainer.ranks = 1. Allowed: no more than the nvidia.com/gpu"),
    ],
)
def test_settings_that_no_node_matches_are_refused(setting: str, message: str) -> None:
    assert refused(on_kubernetes(setting), cluster()).startswith(message)


def test_both_labels_must_be_on_one_node() -> None:
    settings = ("kubernetes.gpu_type=NVIDIA-H100-80GB-HBM3", "kubernetes.node_selector={pool: cpu}")
    assert "No node has all of nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3,pool=cpu" in refused(
        on_kubernetes(*settings), cluster()
    )


def test_gpus_of_ranks_are_checked_for_one_pod() -> None:
    check_access(on_kubernetes("trainer.ranks=32"), cluster())


def test_a_run_on_cpus_needs_no_gpu() -> None:
    check_access(on_kubernetes("kubernetes.gpu_resource=null", "kubernetes.node_selector={pool: cpu}"), cluster())


def test_checks_without_permission_are_skipped() -> None:
    blind = cluster(secrets={}, forbidden=WITHOUT_LOOKS)
    check_access(on_kubernetes("kubernetes.gpu_type=B200"), blind)


def test_a_rayjob_that_the_api_server_refuses_is_refused() -> None:
    class Strict(FakeCluster):
        def dry_run_create(self, kind: Kind, manifest: Object) -> None:
            raise ClusterError(f"the cluster refuses {kind} {name_of(manifest)}: unknown field")

    assert (
        refused(on_kubernetes("name=a"), Strict(FakeClock()))
        == "the cluster refuses rayjobs.ray.io a-a1: unknown field"
    )


def test_the_role_of_the_pipeline_allows_exactly_the_checked_permissions() -> None:
    objects = yaml.safe_load_all((ROOT / "k8s/base/accounts.yaml").read_text(encoding="utf-8"))
    [role] = [o for o in objects if o["kind"] == "Role" and o["metadata"]["name"] == "tidemill-pipeline"]
    allowed = {
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {(verb, kind.group, kind.plural) for kind, verbs in PERMISSIONS for verb in verbs}
    assert allowed - asked == {("get", WORKFLOWS.group, WORKFLOWS.plural)}  # used only in Argo
    assert asked <= allowed
