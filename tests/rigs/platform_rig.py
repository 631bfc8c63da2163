"""The platform of k8s/ in a namespace of a test: rendered, applied, reached, removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.retry import wait_for

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
READY_S = 420
KEYS = {
    "tidemill-store-admin": ("owner", "secret-of-the-owner"),
    "tidemill-store": ("runs", "secret-of-the-runs"),
    "tidemill-mlflow-store": ("tracking", "secret-of-tracking"),
}


@dataclass(frozen=True)
class Platform:
    """A namespace with the platform in it.

    Attributes:
        namespace: its name.
        suffix: of what has no namespace, so that a platform of the cluster itself stays as it is.
    """

    namespace: str
    suffix: str

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace."""
        command = ["kubectl", "--namespace", self.namespace, *words]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=READY_S + 60, check=False)
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done

    def is_allowed(self, account: str, verb: str, resource: str, namespace: str | None = None, name: str = "") -> bool:
        """Whether a service account has a permission, also for kinds that the cluster does not have.

        Args:
            account: of this namespace.
            verb: such as `list`.
            resource: `PLURAL`, `PLURAL.GROUP` or `PLURAL/PART`.
            namespace: where; None is this one.
            name: of an object; "" is any.
        """
        kind, _, part = resource.partition("/")
        plural, _, group = kind.partition(".")
        asked = {
            "namespace": namespace or self.namespace,
            "verb": verb,
            "group": group,
            "resource": plural,
            "name": name,
        }
        spec = {
            "user": f"system:serviceaccount:{self.namespace}:{account}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{self.namespace}", "system:authenticated"],
            "resourceAttributes": asked | {"subresource": part},
        }
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        answer = json.loads(self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(review)).stdout)
        return bool(answer["status"]["allowed"])

    def apply(self, overlay: str, *extra: str, components: Sequence[str] = ()) -> None:
        """Apply an overlay with components, in this namespace."""
        objects = [self.own(tree) for tree in render(overlay, self.namespace, components)]
        self.kubectl("apply", *extra, "-f", "-", stdin=yaml.safe_dump_all(objects))

    def own(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The object; with a unique name if its kind has no namespace."""
        if tree["kind"] in ("ClusterRole", "ClusterRoleBinding", "PriorityClass"):
            tree["metadata"]["name"] += self.suffix
        if tree["kind"] == "ClusterRoleBinding":
            tree["roleRef"]["name"] += self.suffix
        return tree

    def wait(self, name: str, condition: str = "condition=available") -> None:
        """Wait until an object is ready; the error has the logs of its pods."""
        done = self.kubectl("wait", f"--for={condition}", f"--timeout={READY_S}s", name, check=False)
        if done.returncode:
            pytest.fail(f"{done.stderr}\n{self.kubectl('describe', 'pods').stdout}")

    @contextlib.contextmanager
    def forwarded(self, service: str, port: int) -> Iterator[str]:
        """HOST:PORT on this machine that is forwarded to a service."""
        command = ["kubectl", "-n", self.namespace, "port-forward", f"service/{service}", f":{port}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            assert found is not None, f"no way to {service}"
            yield found[0]
        finally:
            process.terminate()
            process.wait(10)
            process.stdout.close()

    def kubeconfig(self, account: str, folder: Path) -> Path:
        """A kubeconfig of a service account, good for two hours."""
        tree = yaml.safe_load(self.kubectl("config", "view", "--raw", "--minify", "--flatten").stdout)
        token = self.kubectl("create", "token", account, "--duration=2h").stdout.strip()
        tree["users"][0]["user"] = {"token": token}
        path = folder / f"{account}.kubeconfig"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        path.chmod(0o600)
        return path

    def remove(self) -> None:
        """Delete the namespace and the objects without a namespace."""
        for name in ("minio", "mlflow"):
            self.kubectl("exec", f"deployment/{name}", "--", "sh", "-c", "rm -rf /data/* /data/.[!.]*", check=False)
        self.kubectl("delete", "namespace", self.namespace, check=False)
        for kind in ("clusterrolebinding", "clusterrole", "priorityclass"):
            names = self.kubectl("get", kind, "-o", "name").stdout.split()
            ours = [name for name in names if name.endswith(self.suffix)]
            if ours:
                self.kubectl("delete", *ours, check=False)
        self.free_volumes()

    def free_volumes(self) -> None:
        """Release static volumes for the next claim; dynamic volumes are deleted with their claim."""
        for volume in json.loads(self.kubectl("get", "pv", "-o", "json").stdout)["items"]:
            claim = volume["spec"].get("claimRef") or {}
            if claim.get("namespace") == self.namespace:
                self.kubectl("patch", "pv", volume["metadata"]["name"], "-p", '{"spec":{"claimRef":null}}', check=False)


def render(overlay: str, namespace: str, components: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The output of kustomize for an overlay with components in another namespace."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        tree = {
            "namespace": namespace,
            "resources": [os.path.relpath(K8S / "overlays" / overlay, here)],
            "components": [os.path.relpath(K8S / "components" / name, here) for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(tree))
        command = ["kubectl", "kustomize", folder]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


def images_of_nodes() -> set[str]:
    """Names of the images that the nodes have."""
    command = ["kubectl", "get", "nodes", "-o", "json"]
    nodes = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    return {name for node in nodes["items"] for image in node["status"]["images"] for name in image["names"] or ()}


def needed(overlay: str) -> set[str]:
    """Images of an overlay."""
    return set(re.findall(r"image: (\S+)", yaml.safe_dump_all(render(overlay, "unused"))))


def new_platform() -> Platform:
    """A new namespace with the secrets of the platform."""
    name = secrets.token_hex(3)
    platform = Platform(f"tidemill-platform-{name}", f"-{name}")
    platform.kubectl("create", "namespace", platform.namespace)
    for secret, (access, key) in KEYS.items():
        values = [f"--from-literal=access_key={access}", f"--from-literal=secret_key={key}"]
        platform.kubectl("create", "secret", "generic", secret, *values)
    return platform


def pod(name: str, image: str, **changes: Mapping[str, Any] | list[Any] | str) -> str:
    """YAML of a sleeping pod of the restricted standard, with changes to its spec."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "sleep", "image": image, "command": ["sleep", "3600"], "securityContext": context}
    spec = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    labels = changes.pop("labels", {})
    container |= changes.pop("container", {})  # type: ignore[arg-type]
    tree = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec | changes}
    return yaml.safe_dump(tree)


def eventually(what: str, probe: Any, seconds: float = 60) -> None:
    """Wait until a probe is true."""
    assert wait_for(probe, seconds, 0.5), f"{what}: not within {seconds:.0f} s"
