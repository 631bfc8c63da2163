"""Reads the settings of a run: one YAML file plus `key.path=value` overrides; unknown keys are refused."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tidemill.config.data import RewardConfig
from tidemill.config.run import RunConfig, fields
from tidemill.config.section import (
    ALIAS,
    BUCKET,
    DNS_LABEL,
    LABEL,
    OBJECT_NAME,
    REGISTERED,
    RESOURCE,
    TAGGED_IMAGE,
    VARIABLE,
)
from tidemill.errors import ConfigError

PATTERNS = {
    DNS_LABEL: "lower-case letters, digits and dashes, with a letter or digit first and last",
    OBJECT_NAME: "lower-case letters, digits, dashes and dots, with a letter or digit on both sides of a dot",
    RESOURCE: "the name of an extended resource, such as nvidia.com/gpu",
    LABEL: "the value of a label, such as NVIDIA-H100-80GB-HBM3: letters, digits, dashes, dots and underscores",
    VARIABLE: "letters, digits, underscores, dots and dashes, with a letter or underscore first",
    BUCKET: "lower-case letters, digits, dots and dashes, with a letter or digit first and last",
    REGISTERED: "letters, digits, dots, underscores and dashes",
    ALIAS: "letters, digits, underscores and dashes, with a letter first",
    TAGGED_IMAGE: "an image with a tag, such as registry/name:1.0, or with a digest @sha256:...",
}
"""What the patterns of text settings allow, in words."""
TRUNCATED = ("rollout.top_p", "rollout.top_k")
"""Settings that engines have, and runs do not."""
KINDS = {"str": "a text", "list": "a list", "NoneType": "nothing"}
"""What a file may hold instead of settings."""
MAPPING = re.compile(r"a valid dictionary( or instance of \w+)?")
"""A section, as pydantic calls it."""
OF_PYDANTIC = ("[key]", "str", "int")
"""Parts of a place that are no keys: that a mapping's key is meant, and which type of several was tried."""
WORDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
    "string_type": "text, between quotes where YAML takes it for something else",
    "list_type": "a list",
}
"""What is allowed, where pydantic's word for it is none of YAML."""
NUMBERS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing", "truth"), "a number"),
}
"""What is allowed by pydantic's word for what is no number."""
UNITS = {"_s": ", in seconds", "_gib": ", in GiB", "_hours": ", in hours", "_tokens": ", in tokens"}
"""How settings end that are in a unit."""
NOISE = re.compile(r"^\w+ should (be|have) | after validation, not \d+$")
"""What pydantic says around what is allowed."""


OTHER_BASES = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 takes for octal or sexagesimal ones."""


class Loader(yaml.SafeLoader):
    """Refuses what YAML would read without a word as something else than stands there: a key that stands twice in a
    mapping, of which it would take the last, and numbers such as 010, its 8, and 1:30, its 90.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """One value."""
        try:
            value = super().construct_object(node, deep)
        except ValueError as error:  # a date that does not exist, or a hexadecimal number without digits
            problem = f"{node.value} is no value: {error}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
        if isinstance(value, int | float) and OTHER_BASES.fullmatch(node.value):
            meant = "write the number without a leading zero or a colon, or a text between quotes"
            problem = f"YAML reads {node.value} as {value}: {meant}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """One mapping."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counted = Counter(key.value for key in keys)
        for key in reversed(keys):
            if counted[key.value] > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value} stands there twice", problem_mark=key.start_mark
                )
        return node


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key.path=value` overrides and validate.

    Files that the config names are taken relative to the config file's folder; `output` to the working directory; `~`
    is the user's own folder.

    Raises:
        ConfigError: naming key, value, what is allowed and what to do.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), "a readable YAML file", f"{error}.") from error
    config = parse_config(text, overrides, base=path.resolve().parent, name=str(path))
    # Absolute, because processes elsewhere in a Ray cluster work in other folders.
    return config.model_copy(update={"output": config.output.expanduser().resolve()})


def parse_config(
    text: str, overrides: Sequence[str] = (), *, base: Path | None = None, name: str | None = None
) -> RunConfig:
    """Parse YAML text as `load_config` does a file.

    Args:
        text: the settings.
        overrides: `key.path=value`, which replace what the text says.
        base: folder of relative data files; None leaves them as they are.
        name: of the file, for messages.

    Raises:
        ConfigError: naming key, value, what is allowed and what to do.
    """
    try:
        tree = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError("config", name or text[:40], "valid YAML", f"{said(error)}.") from error
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        fix = f"It holds {KINDS.get(kind, f'a value of type {kind}')}. Start from examples/addition.yaml."
        raise ConfigError("config", name or text[:40], "a mapping of settings", fix)
    for override in overrides:
        apply_override(tree, override)
    if base is not None:
        anchor_data_files(tree, base)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise explain(error) from error


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: it is none, or says something else than it seems to.
    """
    return yaml.load(text, Loader)


def said(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML text and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"Line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.path=value` in the tree; the value is YAML, a number in the path indexes a list."""
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError("override", override, "key.path=value", "For example trainer.steps=50.")
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        node = descend(node, key, ".".join(keys[: depth + 1]), override)
    last: str | int = keys[-1]
    if isinstance(node, list):
        last = list_index(node, keys[-1], path, override)
    elif not isinstance(node, dict):
        raise ConfigError(
            "override", override, f"a key below a section, and {path} is below a value", "Check the path."
        )
    try:
        node[last] = load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(path, value, "a YAML value", f"{said(error)}.") from error


def descend(node: Any, key: str, path: str, override: str) -> Any:
    """The child of `node`; a missing or null section is made, so that a config file may leave it out."""
    if isinstance(node, list):
        return node[list_index(node, key, path, override)]
    if not isinstance(node, dict):
        raise ConfigError("override", override, f"a key below a section, and {path} is a value", "Check the path.")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def list_index(node: list[Any], key: str, path: str, override: str) -> int:
    """`key` as an index into `node`."""
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError("override", override, f"an index below {len(node)} at {path}", "Count from 0.")
    return int(key)


def anchor_data_files(tree: dict[str, Any], base: Path) -> None:
    """Make the relative file names in `data` absolute."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for key in ("train", "held_out"):
        source = data.get(key)
        if isinstance(source, str) and "://" not in source:
            data[key] = str(base / Path(source).expanduser())


def explain(error: ValidationError) -> ConfigError:
    """Turn one of pydantic's findings into a message for the user: an unknown key first, which makes others missing."""
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    unknown = first["type"] == "extra_forbidden"
    key = ".".join(str(part) for part in first["loc"] if unknown or part not in OF_PYDANTIC)
    if key in TRUNCATED:
        return truncated(key, first["input"])
    if unknown:
        siblings = sibling_keys(first["loc"])
        allowed = f"one of the keys {', '.join(siblings)}"
        return ConfigError(key, first["input"], allowed, f"{meant(key, siblings)}Remove it or mend the spelling.")
    if first["type"] == "missing":
        return ConfigError(key, None, "a value; it has no default", "Add it to the config file.")
    if first["type"] == "string_pattern_mismatch":
        return ConfigError(key, first["input"], PATTERNS[first["ctx"]["pattern"]], "Mend it.")
    more = len(error.errors()) - 1
    rest = f" ({more} more {'setting is' if more == 1 else 'settings are'} wrong.)" if more else ""
    allowed = WORDS.get(first["type"]) or MAPPING.sub("a mapping", NOISE.sub("", first["msg"]))
    if first["type"] in NUMBERS:
        allowed = f"{NUMBERS[first['type']]}{next((unit for end, unit in UNITS.items() if key.endswith(end)), '')}"
    return ConfigError(key, first["input"], allowed, f"See docs/configuration.md.{rest}")


def truncated(key: str, value: object) -> ConfigError:
    """Training samples from less than it computes log-probs of."""
    return ConfigError(
        key,
        value,
        "no setting: rollouts are sampled from the whole distribution",
        "Tokens that an engine never samples would bias the importance ratio; leave it out.",
    )


def meant(key: str, siblings: Sequence[str]) -> str:
    """A question after the setting that was probably meant: one cut short, a similar one, or one of another section."""
    section, _, name = key.rpartition(".")
    short = [sibling for sibling in siblings if sibling.startswith(name.lower())]
    near = [*(short if len(short) == 1 else []), *difflib.get_close_matches(name.lower(), siblings, 1, 0.7)]
    elsewhere = [known for known, _, _ in fields() if known.rpartition(".")[2] == name]
    found = [*(f"{section}.{sibling}".lstrip(".") for sibling in near), *elsewhere]
    return f"Did you mean {found[0]}? " if found else ""


def sibling_keys(loc: Sequence[int | str]) -> list[str]:
    """The keys that the section at `loc[:-1]` has."""
    section: type[BaseModel] = RunConfig
    for part in loc[:-1]:
        if isinstance(part, str):
            section = section_of(section, part)
    return list(section.model_fields)


def section_of(section: type[BaseModel], key: str) -> type[BaseModel]:
    """The class of the section under `key`."""
    annotation = section.model_fields[key].annotation
    return RewardConfig if not isinstance(annotation, type) or not issubclass(annotation, BaseModel) else annotation
