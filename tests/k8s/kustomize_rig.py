"""The manifests of k8s/ as tests see them: every document, where it stands, and what a kustomization refers to."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
KUSTOMIZATIONS = sorted(path.parent for path in K8S.rglob("kustomization.yaml"))
OVERLAYS = sorted(path for path in (K8S / "overlays").iterdir())
PATCHES = set(K8S.rglob("patch.yaml"))


@dataclass(frozen=True)
class Manifest:
    """A document and the file that it stands in."""

    file: Path
    tree: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.tree['kind']}-{self.tree['metadata']['name']}"


def kustomization(folder: Path) -> dict[str, Any]:
    """The kustomization of a folder."""
    tree: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    return tree


def documents() -> list[Manifest]:
    """Everything that is an object of its own, in no order of importance."""
    others = {*K8S.rglob("kustomization.yaml"), *PATCHES, K8S / "kind" / "cluster.yaml"}
    files = sorted(set(K8S.rglob("*.yaml")) - others)
    return [Manifest(file, tree) for file in files for tree in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def of_kind(*kinds: str) -> list[Manifest]:
    """The documents of these kinds."""
    return [manifest for manifest in documents() if manifest.tree["kind"] in kinds]


def pod_template(tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The pod that an object makes, if it makes one."""
    spec = tree.get("spec") or {}
    if tree["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    template: Mapping[str, Any] | None = spec.get("template") if tree["kind"] != "PersistentVolumeClaim" else None
    return template


def containers(template: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All containers of a pod."""
    yield from template["spec"].get("initContainers", ())
    yield from template["spec"]["containers"]


def kubectl() -> str:
    """A kubectl, which has kustomize in it; the test is skipped where there is none."""
    beside = Path("~/.cache/tidemill-cluster/bin/kubectl").expanduser()
    found = shutil.which("kubectl") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        pytest.skip("no kubectl to render with")
    return found


def rendered(folder: Path) -> list[Mapping[str, Any]]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
