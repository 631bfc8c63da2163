"""Checks a RayJob before it is sent: against the schema of the cluster's CRD, then against what KubeRay itself refuses.

`rayjob.json` is made from the CRD of KubeRay 1.7.0 by `condense.py`. The API server would drop a key that it does not
know without a word, and KubeRay says what it does not like only in an event, minutes later.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tidemill.errors import ConfigError, RunError
from tidemill.kuberay.rules import broken_rules

if TYPE_CHECKING:
    from jsonschema import ValidationError

FIX = "Mend the setting under `kubernetes` that it comes from."


def check(manifest: dict[str, Any]) -> None:
    """Refuse a RayJob that the cluster would refuse, or would not read as it is meant.

    Raises:
        ConfigError: naming the path in the manifest.
        RunError: jsonschema is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise RunError("manifests are checked with jsonschema: pip install 'tidemill[pipelines]'") from error
    schema = json.loads(files("tidemill.kuberay").joinpath("rayjob.json").read_text(encoding="utf-8"))
    for found in Draft202012Validator(schema).iter_errors(manifest):
        raise explain(found)
    for mistake in broken_rules(manifest):
        raise ConfigError(mistake.path, mistake.value, mistake.allowed, FIX)


def explain(error: ValidationError) -> ConfigError:
    """A finding of the schema as a message for the user."""
    path, value = dotted(error.absolute_path), error.instance
    if error.validator == "additionalProperties":
        known = sorted(error.schema["properties"])
        unknown = next(key for key in value if key not in known)
        near = difflib.get_close_matches(unknown, known, n=1)
        allowed = f"{near[0]} instead, or no such key" if near else f"one of the keys {', '.join(known)}"
        return ConfigError(f"{path}.{unknown}".lstrip("."), value[unknown], allowed, FIX)
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in value)
        return ConfigError(f"{path}.{missing}".lstrip("."), None, "a value", FIX)
    return ConfigError(path, value, f"{error.validator} {error.validator_value}", FIX)


def dotted(path: Iterable[str | int]) -> str:
    """`spec.containers[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
