"""What stands in k8s/: whole, pinned, locked down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kustomize_rig import (
    K8S,
    KUSTOMIZATIONS,
    OVERLAYS,
    PATCHES,
    Manifest,
    containers,
    documents,
    kustomization,
    of_kind,
    pod_template,
    rendered,
)

from tidemill.sections import KubernetesConfig

KUBERNETES = "1.34"
OWN_KINDS = ("kueue.x-k8s.io/",)  # groups that Kubernetes' own schemas do not have
PINNED = re.compile(r"\?ref=v?\d+\.\d+\.\d+$|/releases/download/v\d+\.\d+\.\d+/")
TAG = re.compile(r"\d")
PODS = [manifest for manifest in documents() if pod_template(manifest.tree) is not None]
SECRETS = K8S / "secrets"


def relative(path: Path) -> str:
    return str(path.relative_to(K8S))


def local_references(folder: Path) -> list[Path]:
    """Every file and folder that a kustomization names."""
    tree = kustomization(folder)
    named = [*tree.get("resources", ()), *tree.get("components", ())]
    named += [patch["path"] for patch in tree.get("patches", ()) if "path" in patch]
    named += [name for generator in tree.get("configMapGenerator", ()) for name in generator["files"]]
    return [(folder / name).resolve() for name in named if "://" not in name]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=relative)
def test_what_a_kustomization_names_is_there(folder: Path) -> None:
    assert [path for path in local_references(folder) if not path.exists()] == []


def test_every_file_is_named_by_a_kustomization() -> None:
    named = {path for folder in KUSTOMIZATIONS for path in local_references(folder)}
    files = {path for path in K8S.rglob("*.yaml") if path.name not in ("kustomization.yaml", "cluster.yaml")}
    files |= set(K8S.rglob("*.py")) | set((K8S / "components").rglob("*.sh"))
    assert files - named == set()
    assert named >= PATCHES


def test_operators_are_pinned() -> None:
    remote = [name for folder in KUSTOMIZATIONS for name in kustomization(folder).get("resources", ()) if "://" in name]
    assert len(remote) == 4
    assert [name for name in remote if not PINNED.search(name)] == []


@pytest.mark.parametrize("manifest", documents(), ids=str)
def test_manifest_keeps_to_the_schema_of_its_kind(manifest: Manifest) -> None:
    if manifest.tree["apiVersion"].startswith(OWN_KINDS):
        assert set(manifest.tree) <= {"apiVersion", "kind", "metadata", "spec"}
    else:
        kubernetes_validate.validate(manifest.tree, KUBERNETES, strict=True)


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_keeps_to_the_restricted_profile(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
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


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_says_what_it_needs(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
    for container in containers(template):
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        assert container["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("manifest", PODS, ids=str)
def test_pod_has_a_token_only_with_an_account_that_may_do_something(manifest: Manifest) -> None:
    template = pod_template(manifest.tree)
    assert template is not None
    account = template["spec"].get("serviceAccountName")
    bound = {s["name"] for binding in of_kind("RoleBinding") for s in binding.tree["subjects"]}
    assert (account in bound) or template["spec"]["automountServiceAccountToken"] is False
    if account in bound:
        assert template["metadata"]["labels"]["tidemill.dev/api-server"] == "true"


def test_accounts_without_rules_give_no_token() -> None:
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
    """The keys that each example of a secret lists."""
    found = {}
    for path in SECRETS.glob("*.env.example"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        assert all(line.endswith("=") for line in lines), f"{path.name} holds a value"
        found[path.name.removesuffix(".env.example")] = [line.removesuffix("=") for line in lines]
    return found


def test_every_secret_that_is_named_has_a_template() -> None:
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


def test_no_secret_stands_in_a_manifest() -> None:
    assert of_kind("Secret") == []


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    for expression in selector.get("matchExpressions", ()):
        present = labels.get(expression["key"])
        if expression["operator"] == "Exists" and present is None:
            return False
        if expression["operator"] == "In" and present not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def labels_of(name: str) -> Mapping[str, str]:
    """Labels of the pods of a deployment, job or cron job."""
    template = next(pod_template(m.tree) for m in PODS if m.tree["metadata"]["name"] == name)
    assert template is not None
    labels: Mapping[str, str] = template["metadata"]["labels"]
    return labels


HEAD = {"ray.io/cluster": "a", "ray.io/node-type": "head"}
WORKER = {"ray.io/cluster": "a", "ray.io/node-type": "worker", "ray.io/group": "trainer"}
SUBMITTER = {"job-name": "addition-a1", "app.kubernetes.io/part-of": "tidemill"}
STEP = {"workflows.argoproj.io/workflow": "addition-x"}


def may_reach(source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    """Whether policies of the base let a pod open a connection to another of the namespace."""
    policies = [m.tree["spec"] for m in of_kind("NetworkPolicy") if m.file.is_relative_to(K8S / "base")]

    def side(labels: Mapping[str, str], other: Mapping[str, str], way: str, peer: str) -> bool:
        rules = [r for spec in policies if matches(spec["podSelector"], labels) for r in spec.get(way, ())]
        return any(
            (not rule.get("ports") or port in [p["port"] for p in rule["ports"]])
            and any(
                "podSelector" in p and "namespaceSelector" not in p and matches(p["podSelector"], other)
                for p in rule[peer]
            )
            for rule in rules
        )

    return side(source, target, "egress", "to") and side(target, source, "ingress", "from")


@pytest.mark.parametrize(
    ("source", "target", "port", "expected"),
    [
        (HEAD, WORKER, 10002, True),
        (WORKER, HEAD, 6379, True),
        (SUBMITTER, HEAD, 8265, True),
        (SUBMITTER, HEAD, 6379, False),
        (WORKER, labels_of("minio"), 9000, True),
        (WORKER, labels_of("minio"), 9001, False),
        (HEAD, labels_of("mlflow"), 5000, True),
        (STEP, labels_of("mlflow"), 5000, True),
        (STEP, labels_of("minio"), 9000, True),
        (STEP, HEAD, 8265, False),
        (labels_of("mlflow"), labels_of("minio"), 9000, True),
        (labels_of("mlflow"), HEAD, 8265, False),
        (labels_of("store-setup"), labels_of("minio"), 9000, True),
        (labels_of("tidemill-reaper"), labels_of("minio"), 9000, False),
        (labels_of("seaweedfs"), labels_of("mlflow"), 5000, False),
    ],
)
def test_policies_let_through_what_is_needed_and_nothing_else(
    source: Mapping[str, str], target: Mapping[str, str], port: int, expected: bool
) -> None:
    assert may_reach(source, target, port) is expected


def test_nothing_is_let_through_by_default() -> None:
    deny = next(m.tree for m in of_kind("NetworkPolicy") if m.tree["metadata"]["name"] == "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Egress", "Ingress"]}


@pytest.mark.parametrize("service", of_kind("Service"), ids=str)
def test_service_has_pods_with_its_port(service: Manifest) -> None:
    selector = service.tree["spec"]["selector"]
    found = [t for m in PODS if (t := pod_template(m.tree)) and selector.items() <= t["metadata"]["labels"].items()]
    assert found != []
    for template in found:
        ports = {port["name"] for container in containers(template) for port in container.get("ports", ())}
        assert {port["targetPort"] for port in service.tree["spec"]["ports"]} <= ports


def test_trainers_go_before_rollouts() -> None:
    values = {m.tree["metadata"]["name"]: m.tree["value"] for m in of_kind("PriorityClass")}
    assert values["tidemill-trainer"] > values["tidemill-rollout"] > 0


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
    assert KubernetesConfig().gpu_resource in group["coveredResources"]
