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
from tidemill.config.section import PATTERNS
from tidemill.config.validation import check
from tidemill.errors import ConfigError

TRUNCATED = ("rollout.top_p", "rollout.top_k")
"""Settings that vLLM has and a run must not have."""
FOUND = {"str": "a text", "list": "a list", "NoneType": "nothing"}
"""What a file holds instead of settings, by type."""
NOT_KEYS = ("[key]", "str", "int")
"""Parts of a location in pydantic's errors that are not keys: a mapping's key, and the member of a union."""
WORDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "path_type": "a path",
    "string_type": "text, in quotes where YAML reads something else",
    "list_type": "a list",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing", "truth"), "a number"),
}
"""What is allowed, by pydantic's type of error, where pydantic's own words are not those of YAML."""
UNITS = {"_s": ", in seconds", "_gib": ", in GiB", "_hours": ", in hours", "_tokens": ", in tokens"}
"""The unit of a number, by the end of the setting's name."""
MAPPING = re.compile(r"a valid dictionary( or instance of \w+)?")
NOISE = re.compile(r"^Value error, |^\w+ should (be|have) | after validation, not \d+$")
"""Pydantic's words around what is allowed."""
OTHER_BASES = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads as octal or sexagesimal."""
LINE_BREAK = re.compile("[\n\r\x85\u2028\u2029]")
"""The line breaks of YAML."""
LEFT_OUT = (yaml.AnchorToken, yaml.DirectiveToken, yaml.DocumentStartToken, yaml.DocumentEndToken, yaml.TagToken)
"""Parts of a YAML text that are not in its value."""


class Loader(yaml.SafeLoader):
    """Refuses YAML that is silently read as something else than it shows: a key given twice, of which YAML takes the
    last, and numbers such as 010, which is 8, and 1:30, which is 90.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except ValueError as error:  # a date that does not exist, or a hexadecimal number without digits
            problem = f"{node.value} is not a value: {error}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
        if isinstance(value, int | float) and OTHER_BASES.fullmatch(node.value):
            fix = "write the number without a leading zero or a colon, or put a text in quotes"
            problem = f"YAML reads {node.value} as {value}: {fix}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counted = Counter(key.value for key in keys)
        for key in reversed(keys):
            if counted[key.value] > 1:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
        return node


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `key.path=value` overrides and validate.

    Data files in the settings are relative to the folder of the file, `output` to the working directory; `~` is the
    user's home.

    Raises:
        ConfigError: naming key, value, what is allowed and what to do.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), "a readable YAML file", f"{error}.") from error
    config = parse_config(text, overrides, base=path.resolve().parent, name=str(path))
    # Absolute, because processes elsewhere in a Ray cluster have other working directories.
    return config.model_copy(update={"output": config.output.expanduser().resolve()})


def parse_config(
    text: str, overrides: Sequence[str] = (), *, base: Path | None = None, name: str | None = None
) -> RunConfig:
    """Parse YAML text as `load_config` does a file.

    Args:
        text: the settings.
        overrides: `key.path=value`, which replace settings of the text.
        base: folder of relative data files; None leaves them as they are.
        name: of the file, for messages.

    Raises:
        ConfigError: naming key, value, what is allowed and what to do.
    """
    try:
        tree = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError("config", name or text[:40], "valid YAML", f"{yaml_problem(error)}.") from error
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        fix = f"It holds {FOUND.get(kind, f'a value of type {kind}')}. Start from examples/addition.yaml."
        raise ConfigError("config", name or text[:40], "a mapping of settings", fix)
    for override in overrides:
        apply_override(tree, override)
    if base is not None:
        resolve_data_files(tree, base)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise explain(error) from error
    check(config)
    return config


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: it is malformed, or `Loader` refuses it.
    """
    return yaml.load(text, Loader)


def load_value(text: str) -> Any:
    """The value of one setting outside a file, as YAML without comments; a plain text stays as it is given.

    YAML ends a plain text at ` #`, and folds line breaks. A command line has neither comments nor wrapped lines.

    Raises:
        yaml.YAMLError: it is malformed, `Loader` refuses it, or YAML would leave out a part of it.
    """
    tokens = [*yaml.scan(text, Loader)][1:-1]
    scalars = [token for token in tokens if isinstance(token, yaml.ScalarToken)]
    given = text.strip()
    if all(token.plain for token in scalars) and len(tokens) == len(scalars):
        whole = not LINE_BREAK.search(given) and given == "".join(text[span(token)] for token in scalars)
        return load_yaml(text) if whole else given
    rest = text
    for token in scalars:
        place = span(token)
        if token.style not in ("|", ">") and LINE_BREAK.search(text[place]):
            fix = 'YAML folds a line break in a text: write "\\n" between double quotes'
            raise yaml.MarkedYAMLError(problem=fix, problem_mark=token.start_mark)
        rest = rest[: place.start] + " " * (place.stop - place.start) + rest[place.stop :]
    left_out = next((token for token in tokens if isinstance(token, LEFT_OUT)), None)
    if left_out is not None or "#" in rest:
        mark = tokens[0].start_mark if left_out is None else left_out.start_mark
        raise yaml.MarkedYAMLError(problem="YAML leaves out a part of it: put texts between quotes", problem_mark=mark)
    return load_yaml(text)


def span(token: yaml.Token) -> slice:
    """Where a token is in its text."""
    return slice(token.start_mark.index, token.end_mark.index)


def yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML text and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"Line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `key.path=value` in the tree; see `load_value`. A number in the path indexes a list."""
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError("override", override, "key.path=value", "For example trainer.steps=50.")
    node: Any = tree
    for depth, key in enumerate(keys[:-1], start=1):
        if isinstance(node, list):
            node = node[list_index(node, key, keys[:depth], override)]
        else:
            node = section_at(node, keys[: depth - 1], override)
            if node.get(key) is None:  # a section that the file leaves out
                node[key] = {}
            node = node[key]
    try:
        new = load_value(value)
    except yaml.YAMLError as error:
        raise ConfigError(path, value, "a YAML value", f"{yaml_problem(error)}.") from error
    if isinstance(node, list):
        node[list_index(node, keys[-1], keys, override)] = new
    else:
        section_at(node, keys[:-1], override)[keys[-1]] = new


def section_at(node: Any, path: Sequence[str], override: str) -> dict[str, Any]:
    """The section at `path`."""
    if not isinstance(node, dict):
        raise ConfigError("override", override, f"a key in a section; {'.'.join(path)} is a value", "Check the path.")
    return node


def list_index(node: list[Any], key: str, path: Sequence[str], override: str) -> int:
    """`key` as an index into `node`."""
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError("override", override, f"an index below {len(node)} at {'.'.join(path)}", "Count from 0.")
    return int(key)


def resolve_data_files(tree: dict[str, Any], base: Path) -> None:
    """Make the relative file names in `data` absolute."""
    data = tree.get("data")
    if not isinstance(data, dict):
        return
    for key in ("train", "held_out"):
        source = data.get(key)
        if isinstance(source, str) and "://" not in source:
            data[key] = str(base / Path(source).expanduser())


def explain(error: ValidationError) -> ConfigError:
    """One of pydantic's findings as a message for the user: an unknown key first, because it makes others missing."""
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    unknown = first["type"] == "extra_forbidden"
    key = ".".join(str(part) for part in first["loc"] if unknown or part not in NOT_KEYS)
    if key in TRUNCATED:
        allowed = "no setting: rollouts are sampled from the whole distribution"
        fix = "Tokens that an engine never samples would bias the importance ratio. Leave it out."
        return ConfigError(key, first["input"], allowed, fix)
    if unknown:
        siblings = sibling_keys(first["loc"])
        fix = f"{did_you_mean(key, siblings)}Remove it or correct the spelling."
        return ConfigError(key, first["input"], f"one of the keys {', '.join(siblings)}", fix)
    if first["type"] == "missing":
        return ConfigError(key, None, "a value; it has no default", "Add it to the config file.")
    if first["type"] == "string_pattern_mismatch":
        return ConfigError(key, first["input"], PATTERNS[first["ctx"]["pattern"]], "Correct it.")
    more = len(error.errors()) - 1
    rest = f" ({more} more {'setting is' if more == 1 else 'settings are'} wrong.)" if more else ""
    allowed = WORDS.get(first["type"]) or MAPPING.sub("a mapping", NOISE.sub("", first["msg"]))
    if allowed in ("an integer", "a number"):
        allowed += next((unit for end, unit in UNITS.items() if key.endswith(end)), "")
    return ConfigError(key, first["input"], allowed, f"See docs/configuration.md.{rest}")


def did_you_mean(key: str, siblings: Sequence[str]) -> str:
    """A question after the intended setting: one with this beginning, a similar one, or one of another section."""
    section, _, name = key.rpartition(".")
    short = [sibling for sibling in siblings if sibling.startswith(name.lower())]
    near = [*(short if len(short) == 1 else []), *difflib.get_close_matches(name.lower(), siblings, 1, 0.7)]
    elsewhere = [known for known, _, _ in fields() if known.rpartition(".")[2] == name]
    found = [*(f"{section}.{sibling}".lstrip(".") for sibling in near), *elsewhere]
    return f"Did you mean {found[0]}? " if found else ""


def sibling_keys(location: Sequence[int | str]) -> list[str]:
    """The keys of the section that the key at `location` is in."""
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        if isinstance(part, str):
            kind = section.model_fields[part].annotation
            section = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else RewardConfig
    return list(section.model_fields)
