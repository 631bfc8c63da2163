"""The manifests of k8s/ are complete, valid, pinned and restricted."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kustomize_rig import (
    COMPONENTS,
    K8S,
    KUSTOMIZATIONS,
    OVERLAYS,
    PATCHES,
    Manifest,
    composed,
    containers,
    documents,
    kustomization,
    of_kind,
    pod_template,
    pods,
    rendered,
)

from tidemill.config.kubernetes import KubernetesConfig

KUBERNETES = "1.34"
OWN_KINDS = ("kueue.x-k8s.io/",)  # groups that Kubernetes' own schemas do not have
PINNED = re.compile(r"\?ref=v?\d+\.\d+\.\d+$|/releases/download/v\d+\.\d+\.\d+/")
TAG = re.compile(r"\d")
PODS = [manifest for manifest, _ in pods()]
SECRETS = K8S / "secrets"


def relative(path: Path) -> str:
    return str(path.relative_to(K8S))


def local_references(folder: Path) -> list[Path]:
    """Every file and folder that a kustomization refers to."""
    tree = kustomization(folder)
    named = [*tree.get("resources", ()), *tree.get("components", ())]
    named += [patch["path"] for patch in tree.get("patches", ()) if "path" in patch]
    named += [name for generator in tree.get("configMapGenerator", ()) for name in generator["files"]]
    return [(folder / name).resolve() for name in named if "://" not in name]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=relative)
def test_paths_in_kustomizations_exist(folder: Path) -> None:
    assert [path for path in local_references(folder) if not path.exists()] == []


def test_every_file_is_used_by_a_kustomization() -> None:
    named = {path for folder in KUSTOMIZATIONS for path in local_references(folder)}
    files = {path for path in K8S.rglob("*.yaml") if path.name not in ("kustomization.yaml", "cluster.yaml")}
    files |= set(K8S.rglob("*.py")) | set((K8S / "components").rglob("*.sh"))
    assert files - named == set()
    assert named >= PATCHES


def test_operators_are_pinned() -> None:
    remote = [name for folder in KUSTOMIZATIONS for name in kustomization(folder).get("resources", ()) if "://" in name]
    assert len(remote) == 4
    assert [name for name in remote if not PINNED.search(name)] == []


def check_schema(tree: Mapping[str, Any]) -> None:
    if tree["apiVersion"].startswith(OWN_KINDS):
        assert set(tree) <= {"apiVersion", "kind", "metadata", "spec"}
    else:
        validate(json.dumps(tree))


@functools.cache
def validate(tree: str) -> None:
    """Validate a JSON object; cached, because overlays share most objects and a validation takes 0.1 s."""
    kubernetes_validate.validate(json.loads(tree), KUBERNETES, strict=True)


def check_restricted(template: Mapping[str, Any]) -> None:
    pod = template["spec"]["securityContext"]
    assert (pod["runAsNonRoot"], pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert pod["runAsUser"] >= 1000
    for container in containers(template):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(template["spec"])
    assert not [volume for volume in template["spec"].get("volumes", ()) if "hostPath" in volume]


@pytest.mark.parametrize("manifest", documents(), ids=str)
def test_manifest_is_valid(manifest: Manifest) -> None:
    check_schema(manifest.tree)


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_passes_the_restricted_standard(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
    check_restricted(template)


def check_applied(objects: list[Mapping[str, Any]]) -> None:
    for tree in objects:
        check_schema(tree)
        template = pod_template(tree)
        if template is not None:
            check_restricted(template)
        if tree["kind"] == "ConfigMap":  # a step may change ConfigMaps, and these scripts run with other keys
            assert tree["immutable"] is True


@pytest.mark.parametrize("overlay", OVERLAYS, ids=relative)
def test_overlay_is_valid(overlay: Path) -> None:
    check_applied(rendered(overlay))


@pytest.mark.parametrize("component", COMPONENTS)
def test_base_with_component_is_valid(component: str) -> None:
    objects = composed([component])
    check_applied(objects)
    assert objects != composed([])


def test_overlay_with_all_components_is_valid() -> None:
    check_applied(composed(["mlflow-accounts", "mlflow-database", "seaweedfs", "profile", "hub", "kueue"]))


def test_profile_overlay_puts_everything_into_the_existing_namespace() -> None:
    objects = composed(["profile", "hub"], "team-a")
    assert {tree["metadata"].get("namespace") for tree in objects} == {None, "team-a"}
    whole = {tree["kind"] for tree in objects if "namespace" not in tree["metadata"]}
    assert whole == {"ClusterRole", "PriorityClass"}  # the same for every profile
    subjects = [subject for tree in objects for subject in tree.get("subjects", ())]
    assert {subject["namespace"] for subject in subjects} == {"team-a"}


def test_one_object_store_is_behind_the_service() -> None:
    """Also if another overlay was applied before: objects that an overlay leaves out keep running."""
    for overlay in OVERLAYS:
        stores = [t for t in rendered(overlay) if t["kind"] == "Deployment" and is_store(t)]
        assert sum(tree["spec"]["replicas"] for tree in stores) == 1
        assert "minio" in [tree["metadata"]["name"] for tree in stores]


def is_store(tree: Mapping[str, Any]) -> bool:
    label: str = tree["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
    return label == "store"


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_has_resource_requests(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
    for container in containers(template):
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert container["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_has_a_token_only_if_its_account_has_permissions(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
    account = template["spec"].get("serviceAccountName")
    bound = {s["name"] for binding in of_kind("RoleBinding") for s in binding.tree["subjects"]}
    assert (account in bound) or template["spec"]["automountServiceAccountToken"] is False
    if account in bound:
        assert template["metadata"]["labels"]["tidemill.dev/api-server"] == "true"


def test_accounts_without_permissions_mount_no_token() -> None:
    accounts = {(str(m.file), m.tree["metadata"]["name"]): m.tree for m in of_kind("ServiceAccount")}
    base = str(K8S / "base" / "accounts.yaml")
    for name in (KubernetesConfig().service_account, "default"):
        assert accounts[base, name]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("overlay", OVERLAYS, ids=relative)
def test_overlay_renders_with_every_image_pinned(overlay: Path) -> None:
    objects = rendered(overlay)
    templates = [template for tree in objects if (template := pod_template(tree)) is not None]
    images = [container["image"] for template in templates for container in containers(template)]
    assert len(images) >= 3
    assert [image for image in images if image.rpartition(":")[2] in ("", "latest", image)] == []


@pytest.mark.parametrize("overlay", OVERLAYS, ids=relative)
def test_overlay_keeps_everything_in_the_namespace_of_the_runs(overlay: Path) -> None:
    spaces = {tree["metadata"].get("namespace") for tree in rendered(overlay)}
    assert spaces <= {None, KubernetesConfig().namespace, "kubeflow"}


def test_no_image_is_called_latest() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in K8S.rglob("*.yaml"))
    assert ":latest" not in text
    tags = [
        i["newTag"] for f in KUSTOMIZATIONS for i in kustomization(f).get("images", ()) if "localhost" not in str(i)
    ]
    assert len(tags) >= 3
    assert [tag for tag in tags if not TAG.search(str(tag))] == []


def secret_keys(tree: Any) -> set[tuple[str, str]]:
    """Every `secretKeyRef` in a document, as name and key."""
    if isinstance(tree, Mapping):
        own = {(tree["secretKeyRef"]["name"], tree["secretKeyRef"]["key"])} if "secretKeyRef" in tree else set()
        return own.union(*(secret_keys(value) for value in tree.values()))
    if isinstance(tree, list):
        return set().union(*(secret_keys(item) for item in tree))
    return set()


def templates() -> dict[str, list[str]]:
    """The keys of each example of a secret."""
    found = {}
    for path in SECRETS.glob("*.env.example"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        assert all(line.endswith("=") for line in lines), f"{path.name} holds a value"
        found[path.name.removesuffix(".env.example")] = [line.removesuffix("=") for line in lines]
    return found


def test_every_referenced_secret_has_a_template() -> None:
    files = list(K8S.rglob("*.yaml"))
    trees = [tree for path in files for tree in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    used = set().union(*(secret_keys(tree) for tree in trees))
    listed = {(name, key) for name, keys in templates().items() for key in keys}
    assert used == listed
    assert {key for name, key in used if name == KubernetesConfig().store_secret} == {"access_key", "secret_key"}


def test_the_base_needs_the_secrets_that_are_generated() -> None:
    base = {name for m in documents() if m.file.is_relative_to(K8S / "base") for name, _ in secret_keys(m.tree)}
    generators = kustomization(SECRETS)["secretGenerator"]
    assert base == {generator["name"] for generator in generators}
    assert all(generator["envs"] == [f"{generator['name']}.env"] for generator in generators)


def test_manifests_of_k8s_contain_no_secret() -> None:
    assert of_kind("Secret") == []


@pytest.mark.parametrize("service", of_kind("Service"), ids=str)
def test_service_selects_pods_with_its_port(service: Manifest) -> None:
    selector = service.tree["spec"]["selector"]
    found = [t for m in PODS if (t := pod_template(m.tree)) and selector.items() <= t["metadata"]["labels"].items()]
    assert found != []
    for template in found:
        ports = {port["name"] for container in containers(template) for port in container.get("ports", ())}
        assert {port["targetPort"] for port in service.tree["spec"]["ports"]} <= ports


def test_trainers_have_priority_over_rollouts() -> None:
    values = {m.tree["metadata"]["name"]: m.tree["value"] for m in of_kind("PriorityClass")}
    assert values["tidemill-trainer"] > values["tidemill-rollout"] > 0


def test_disruption_budgets_protect_ready_pods_only() -> None:
    for manifest in of_kind("PodDisruptionBudget"):
        assert manifest.tree["spec"]["minAvailable"] > 1000
        assert manifest.tree["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_namespace_refuses_pods_that_are_not_restricted() -> None:
    labels = of_kind("Namespace")[0].tree["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_a_queue_admits_runs_of_the_namespace() -> None:
    queue = next(m.tree for m in of_kind("ClusterQueue"))
    local = next(m.tree for m in of_kind("LocalQueue"))
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert local["metadata"]["namespace"] == KubernetesConfig().namespace
    [group] = queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert [resource["name"] for resource in flavor["resources"]] == group["coveredResources"]
    resource = KubernetesConfig().gpu_resource
    assert resource in group["coveredResources"]
    quota = next(tree for tree in rendered(K8S / "overlays" / "kueue") if tree["kind"] == "ResourceQuota")
    admitted = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
    assert str(admitted[resource]) == quota["spec"]["hard"][f"requests.{resource}"]
