"""The manifests of k8s/: every document with its file, and rendered kustomizations."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
KUSTOMIZATIONS = sorted(path.parent for path in K8S.rglob("kustomization.yaml"))
OVERLAYS = sorted(path for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
PATCHES = set(K8S.rglob("patch.yaml"))


@dataclass(frozen=True)
class Manifest:
    """A document and its file."""

    file: Path
    tree: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.tree['kind']}-{self.tree['metadata']['name']}"


def kustomization(folder: Path) -> dict[str, Any]:
    """The kustomization of a folder."""
    tree: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    return tree


@functools.cache
def documents() -> tuple[Manifest, ...]:
    """All documents that are objects, without kustomizations and patches."""
    others = {*K8S.rglob("kustomization.yaml"), *PATCHES, K8S / "kind" / "cluster.yaml"}
    files = sorted(set(K8S.rglob("*.yaml")) - others)
    return tuple(
        Manifest(file, tree) for file in files for tree in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    )


def of_kind(*kinds: str) -> list[Manifest]:
    """The documents of these kinds."""
    return [manifest for manifest in documents() if manifest.tree["kind"] in kinds]


def pod_template(tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The pod template of an object, None without one."""
    spec = tree.get("spec") or {}
    if tree["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: Mapping[str, Any] | None = spec.get("template") if tree["kind"] != "PersistentVolumeClaim" else None
    return template


def containers(template: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All containers of a pod."""
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def pods() -> Iterator[tuple[Manifest, Mapping[str, Any]]]:
    """Every document with a pod template, and the template."""
    for manifest in documents():
        template = pod_template(manifest.tree)
        if template is not None:
            yield manifest, template


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches labels."""
    for expression in selector.get("matchExpressions", ()):
        present = labels.get(expression["key"])
        if expression["operator"] == "Exists" and present is None:
            return False
        if expression["operator"] == "In" and present not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def kubectl() -> str:
    """Path of kubectl, which contains kustomize; the test is skipped without one."""
    beside = Path("~/.cache/tidemill-cluster/bin/kubectl").expanduser()
    found = shutil.which("kubectl") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        pytest.skip("no kubectl to render with")
    return found


def composed(components: Sequence[str], namespace: str = "tidemill") -> list[Mapping[str, Any]]:
    """The objects of an overlay of the base with components."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        tree = {
            "resources": [os.path.relpath(K8S / "base", here)],
            "components": [os.path.relpath(K8S / "components" / name, here) for name in components],
        }
        if namespace != "tidemill":
            tree["namespace"] = namespace
        (here / "kustomization.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        return rendered(here)


@functools.cache
def rendered(folder: Path) -> list[Mapping[str, Any]]:
    """The objects that `kubectl apply -k` sends."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
