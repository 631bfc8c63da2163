"""The settings of a verl command: a Hydra YAML file with `KEY=VALUE` overrides, references resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tidemill.config.reading import load_value, load_yaml, yaml_problem
from tidemill.errors import ConfigError

OVERRIDE = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_]\w*(?:\.[\w-]+)*)(?:=(?P<value>.*))?", re.DOTALL)
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""Numbers such as 1e-6, which Hydra reads as numbers and YAML 1.1 as text."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
FUNCTION = re.compile(r"oc\.(?P<name>select|env):(?P<argument>[^,]+)(?:,(?P<default>.*))?", re.DOTALL)
DEPTH = 20
"""References that lead to one another, at most: more are a circle."""
CONFIGS = ("ppo_trainer", "fully_async_ppo_trainer", "_self_")
OPTIONS = {
    "--config-name": re.compile(r"fully_async_ppo_trainer(\.yaml)?"),
    "--config-path": re.compile(r"(.*fully_async_policy/)?config/?"),
}
"""Hydra's options that choose a configuration, and the values with which it is verl's fully asynchronous trainer."""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that only Hydra can work out, and why."""

    why: str


@cache
def verl_defaults() -> Mapping[str, Any]:
    """The default of every setting of verl's fully asynchronous trainer, by dotted key; references as they are."""
    tree = yaml.safe_load(files("tidemill.verl").joinpath("defaults.yaml").read_text(encoding="utf-8"))
    return flat(tree)


def read_settings(
    overrides: Sequence[str], config: Path | None, environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a verl command and the defaults of verl, by dotted key.

    A value is `Unresolved` where only Hydra could tell it.

    Args:
        overrides: the words after the module in verl's command: `KEY=VALUE`, `+KEY=VALUE`, `++KEY=VALUE`, `~KEY`, and
            `--config-name=NAME` or `--config-path=PATH`. They win over the file, and the last one wins over others.
        config: a Hydra YAML file; None for none.
        environment: variables for `${oc.env:NAME}` and `~/`.

    Raises:
        ConfigError: the file cannot be read, or a word is not an override.
    """
    settings: dict[str, Any] = {}
    for word in [*(() if config is None else read_file(config, settings)), *overrides]:
        apply(settings, word)
    known = {**verl_defaults(), **settings}
    given, defaults = (
        {key: resolved(value, key, known, environment) for key, value in values.items()}
        for values in (settings, verl_defaults())
    )
    return given, defaults


def read_file(path: Path, settings: dict[str, Any]) -> list[str]:
    """Put the settings of a file into `settings`; returns the overrides that it lists, as `.hydra/overrides.yaml`."""
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = yaml_problem(error) if isinstance(error, yaml.YAMLError) else error
        raise ConfigError("--config", str(path), "a readable YAML file", f"{problem}.") from error
    if isinstance(tree, list) and all(isinstance(item, str) for item in tree):
        return tree
    if not isinstance(tree, dict):
        allowed = "a Hydra configuration (a mapping), or the .hydra/overrides.yaml of a run (a list of KEY=VALUE)"
        raise ConfigError("--config", str(path), allowed, f"The file holds a {type(tree).__name__}.")
    unknown = [item for item in tree.pop("defaults", None) or [] if item not in CONFIGS]
    if unknown:
        fix = "Compose the file first (`--cfg job` of verl's command prints all settings), and give the result."
        raise ConfigError("--config", {"defaults": unknown}, f"defaults from {' or '.join(CONFIGS)}", fix)
    settings.update(flat(tree))
    return []


def apply(settings: dict[str, Any], word: str) -> None:
    option, _, name = word.partition("=")
    if option in OPTIONS:
        if not OPTIONS[option].fullmatch(name):
            fix = "Give your own configuration with --config FILE. The trainer is data-parallel (FSDP), not Megatron."
            allowed = "verl's config/fully_async_ppo_trainer.yaml, whose defaults are known"
            raise ConfigError(option, name, allowed, fix)
        return
    match = OVERRIDE.fullmatch(word)
    if match is None or (match["sign"] == "~") == (match["value"] is not None):
        raise ConfigError(
            "override", word, "KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY", "Only settings are converted."
        )
    value = None if match["value"] is None else parse(match["value"])
    for key, leaf in flat({match["key"]: value}).items():
        parents = {key[: dot.start()] for dot in re.finditer(r"\.", key)}
        for other in [other for other in settings if other in parents or f"{other}.".startswith(f"{key}.")]:
            del settings[other]
        if match["sign"] != "~":
            settings[key] = leaf


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted key; `_target_`, the class that verl makes of a mapping, is left out."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "_target_":
            continue
        if not isinstance(key, str) or ":" in key:
            leaves[f"{prefix}{key}"] = Unresolved(f"{key!r} is not a key: write a space after the colon")
        elif isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        elif value != "???":  # Hydra's mark of a value that must be given
            number = isinstance(value, str) and SCIENTIFIC.fullmatch(value)
            leaves[f"{prefix}{key}"] = float(value) if number else value
    return leaves


def parse(text: str) -> Any:
    if "${" in text:
        inside = text[0] in "[{"
        return Unresolved(f"{text}, which refers to other settings inside a list") if inside else text
    if text == "None":
        return None
    try:
        return float(text) if SCIENTIFIC.fullmatch(text) else load_value(text)
    except yaml.YAMLError as error:
        return Unresolved(f"{text} ({yaml_problem(error)})")


def resolved(value: Any, key: str, known: Mapping[str, Any], environment: Mapping[str, str], depth: int = DEPTH) -> Any:
    """A value with its references replaced by what they refer to, and `~/` by the home folder."""
    if isinstance(value, list | dict) and "${" in str(value):
        return Unresolved(f"{value}, which refers to other settings inside a list")
    if not isinstance(value, str):
        return value
    if depth == 0:
        return Unresolved(f"{value}, which refers to itself")
    text = value
    for _ in range(DEPTH):
        match = REFERENCE.search(text)
        if match is None:
            break
        found = referred(match[1], key, known, environment, depth - 1)
        if isinstance(found, Unresolved) or match[0] == text:
            return found
        text = text[: match.start()] + str(found) + text[match.end() :]
    if "${" in text:
        return Unresolved(f"{value}, which has more than references")
    return environment["HOME"] + text[1:] if text.startswith("~/") and "HOME" in environment else text


def referred(reference: str, key: str, known: Mapping[str, Any], environment: Mapping[str, str], depth: int) -> Any:
    function = FUNCTION.fullmatch(reference)
    name = function["argument"].strip() if function else reference
    default = parse(function["default"].strip()) if function and function["default"] is not None else None
    if function and function["name"] == "env":
        if name in environment or function["default"] is not None:
            return environment.get(name, default)
        return Unresolved(f"${{{reference}}}: the environment variable {name} is not set")
    if name.startswith("."):
        levels = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-levels], name.lstrip(".")])
    if name in known:
        return resolved(known[name], name, known, environment, depth)
    if function and not any(other.startswith(f"{name}.") for other in known):
        return default
    return Unresolved(f"${{{reference}}}: only references to single settings, oc.select and oc.env are resolved")
