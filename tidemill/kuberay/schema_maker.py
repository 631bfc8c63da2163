"""Makes `rayjob.json`, the schema that manifests are checked with, from the RayJob CRD of KubeRay.

`python -m tidemill.kuberay.schema_maker ray.io_rayjobs.yaml` writes it beside this file. What is left out refuses
nothing: descriptions, defaults, `status`. What stands in several places, such as the pod, is written once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("rayjob.json")
VERSION = "v1"
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
INT32 = {"minimum": -(2**31), "maximum": 2**31 - 1}
SHARED_SIZE = 60
"""Characters from which on a part that stands in several places is written once."""


def condense(crd: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a RayJob to send, closed: a key that the CRD does not have is refused."""
    version = next(version for version in crd["spec"]["versions"] if version["name"] == VERSION)
    whole = version["schema"]["openAPIV3Schema"]
    spec = closed(whole["properties"]["spec"])
    top = {
        "apiVersion": {"enum": [f"{crd['spec']['group']}/{VERSION}"]},
        "kind": {"enum": [crd["spec"]["names"]["kind"]]},
        "metadata": {"type": "object"},
        "spec": spec,
    }
    tree = {"type": "object", "required": list(top), "properties": top, "additionalProperties": False}
    return shared(tree)


def closed(node: dict[str, Any]) -> dict[str, Any]:
    """A part of an OpenAPI schema as JSON schema that takes no unknown keys."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {key: node[key] for key in ("pattern",) if key in node}
    result: dict[str, Any] = dict(INT32) if node.get("format") == "int32" else {}
    result |= {key: node[key] for key in KEPT if key in node}
    if "properties" in node:
        result["properties"] = {name: closed(child) for name, child in node["properties"].items()}
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = closed(node["additionalProperties"])
    elif "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    if "items" in node:
        result["items"] = closed(node["items"])
    return result


def shared(tree: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with parts that repeat as definitions."""
    counts = Counter(text(part) for part in parts(tree))
    often = {part for part, count in counts.items() if count > 1 and len(part) >= SHARED_SIZE}
    definitions: dict[str, Any] = {}
    result = replaced(tree, often, definitions)
    return result | {"$defs": dict(sorted(definitions.items()))}


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema, itself included."""
    yield node
    for child in children(node).values():
        yield from parts(child)


def children(node: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The schemas directly below one, by their place."""
    found: dict[tuple[str, ...], dict[str, Any]] = {
        ("properties", name): child for name, child in node.get("properties", {}).items()
    }
    found |= {(key,): node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)}
    return found


def replaced(node: dict[str, Any], often: set[str], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema with references instead of the parts in `often`, which are added to `definitions`."""
    written = text(node)
    name = hashlib.sha256(written.encode()).hexdigest()[:8]
    if written in often and name in definitions:
        return {"$ref": f"#/$defs/{name}"}
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in node.items()}
    for place, child in children(node).items():
        target = result if len(place) == 1 else result[place[0]]
        target[place[-1]] = replaced(child, often, definitions)
    if written not in often:
        return result
    definitions[name] = result
    return {"$ref": f"#/$defs/{name}"}


def text(node: Any) -> str:
    """A schema in its one written form."""
    return json.dumps(node, sort_keys=True, separators=(",", ":"))


def main(arguments: list[str]) -> None:
    """Write the file from the CRD that is named."""
    crd = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
    FILE.write_text(text(condense(crd)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
