"""Validates RayJobs against KubeRay's CRD, without a cluster.

`python tests/rigs/rayjob_schema.py CRD.yaml KUBERAY_VERSION` writes the schema of the CRD to `golden/`. It leaves out
descriptions, `status`, and the pod templates, which `kubernetes-validate` checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

FOLDER = Path(__file__).parent / "golden"
VERSIONS = ("1.6.1", "1.7.0")
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}
POD_TEMPLATES = ("template", "submitterPodTemplate")
OMITTED = (*POD_TEMPLATES, "gcsFaultToleranceOptions", "headService", "env", "envFrom", "networkPolicy")
"""Large parts: the pod templates, and what no run uses."""
Tree = dict[str, Any]


def schema_file(version: str) -> Path:
    return FOLDER / f"rayjob-{version}.json"


def check(job: Tree, version: str) -> None:
    """Raise jsonschema's or kubernetes-validate's error about a RayJob; unknown fields are an error too."""
    Draft202012Validator(json.loads(schema_file(version).read_text(encoding="utf-8"))).validate(job)
    for template in pod_templates(job):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def pod_templates(node: Any) -> Iterator[Tree]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from (value,) if key in POD_TEMPLATES else pod_templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_templates(value)


def condense(crd: Tree) -> Tree:
    """JSON schema of a RayJob, without unknown fields."""
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    spec = closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    top = {
        "apiVersion": {"enum": ["ray.io/v1"]},
        "kind": {"enum": ["RayJob"]},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    return {"type": "object", "required": list(top), "properties": top, "additionalProperties": False}


def closed(node: Tree) -> Tree:
    """A part of an OpenAPI schema as a JSON schema without unknown fields."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {key: node[key] for key in ("pattern",) if key in node}
    result: Tree = dict(INT32) if node.get("format") == "int32" else {}
    result |= {key: node[key] for key in KEPT if key in node}
    if "properties" in node:
        result["properties"] = {
            name: {"type": "object"} if name in OMITTED else closed(child) for name, child in node["properties"].items()
        }
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = closed(node["additionalProperties"])
    elif "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    if "items" in node:
        result["items"] = closed(node["items"])
    return result


if __name__ == "__main__":
    path, version = sys.argv[1:]
    text = json.dumps(condense(yaml.safe_load(Path(path).read_text(encoding="utf-8"))), separators=(",", ":"))
    schema_file(version).write_text(text + "\n", encoding="utf-8")
