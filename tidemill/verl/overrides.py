"""Settings of verl in YAML: the list that Hydra writes to `.hydra/overrides.yaml` of a run, or a file of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tidemill.errors import ConfigError

KNOWN_DEFAULTS = {"ppo_trainer", "fully_async_ppo_trainer", "_self_"}


def overrides(text: str) -> list[str] | None:
    """The settings of a YAML file, each as on a command line; None for what is no such file, as a shell script.

    Raises:
        ConfigError: the file takes its defaults from files that are not known here.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    if isinstance(tree, list) and all(isinstance(item, str) and "=" in item for item in tree):
        return tree
    if isinstance(tree, dict) and any(isinstance(value, dict) for value in tree.values()):
        if unknown := sorted({str(item) for item in tree.pop("defaults", None) or []} - KNOWN_DEFAULTS):
            fix = "Their defaults are not known here: write out what they set."
            raise ConfigError("SCRIPT", f"defaults: {unknown}", " or ".join(sorted(KNOWN_DEFAULTS)), fix)
        return list(flat(tree, ""))
    return None


def flat(tree: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """`key.path=value` for every leaf, the value as Hydra would read it."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            written = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
            yield f"{prefix}{key}=" + written.removesuffix("\n").removesuffix("\n...")
