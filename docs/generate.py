"""Writes docs/configuration.md and docs/verl_settings.md from the code; `--check` only compares them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tidemill.config.run import fields
from tidemill.verl.rules import RULES, Becomes, LeftOut, Part, Rule, either

CONFIGURATION = """# Configuration

A run is one YAML file. `tidemill run FILE key.path=value ...` overrides single keys; a number in the path indexes a
list (`rewards.0.timeout_s=5`). The value is YAML without comments: a plain text stays as typed, with `#` and line
breaks. Unknown keys and impossible combinations are refused before anything starts. `examples/` has files to start
from, and `runs/NAME/config.yaml` holds the settings of a run.

`tidemill run --resume NAME key.path=value ...` continues a run with other settings: more `trainer.steps`, another
learning rate, other engines. A change of a setting that its checkpoints depend on is refused and needs a new run:
`model`, `seed`, `data`, `rewards` (except `timeout_s`), `algorithm`, `asynchrony` and `trainer.ppo_mini_batch_size`.
Refused settings leave `config.yaml` unchanged.

This page is generated from `tidemill/config/` (`make golden`).
"""
VERL_SETTINGS = """# Every setting of verl

What `tidemill convert-verl` does with the settings of verl's fully asynchronous trainer; [from_verl.md](from_verl.md)
explains the command. A star stands for any rest of the name. A setting that is not on this page is refused, unless it
has verl's own default.

This page is generated from `tidemill/verl/rules.py` (`make golden`).
"""


def configuration() -> Iterator[str]:
    """The table of the top level, and one for every section, in the order of a run file."""
    yield CONFIGURATION
    section: type[BaseModel] | None = None
    order = list(dict.fromkeys(owner for _, owner, _ in fields()))
    for key, owner, name in sorted(fields(), key=lambda knob: order.index(knob[1])):
        if owner is not section:
            section = owner
            yield f"\n## {heading(key)}\n\n{inspect.getdoc(owner)}\n"
            yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
        yield row(key, owner, name)


def verl_settings() -> Iterator[str]:
    """A table for each kind of rule; settings that are treated alike share a row."""
    yield VERL_SETTINGS
    tables: dict[str, dict[str, list[str]]] = {}
    for key, rule in RULES.items():
        heading, effect = effect_of(rule)
        tables.setdefault(heading, {}).setdefault(effect, []).append(f"`{key}`")
    for heading, rows in tables.items():
        yield f"\n## {heading}\n\n| verl | {'Tidemill' if heading == 'Converted' else 'Why'} |\n|---|---|"
        yield from (f"| {', '.join(keys)} | {effect} |" for effect, keys in rows.items())


def effect_of(rule: Rule) -> tuple[str, str]:
    """The table that a rule belongs to, and its cell there."""
    if isinstance(rule, Becomes | Part):
        return "Converted", ", ".join(f"`{key}`" for key in rule.key.split(", "))
    if isinstance(rule, LeftOut):
        return "Left out", rule.why
    return ("Only one value", f"only `{either(rule.values)}`: {rule.why}") if rule.values else ("Refused", rule.why)


def heading(key: str) -> str:
    """The section's path, as in the YAML file."""
    return f"`{key.rpartition('.')[0]}`" if "." in key else "The run"


def row(key: str, owner: type[BaseModel], name: str) -> str:
    """The table row of one knob."""
    field = owner.model_fields[name]
    kind = type_name(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    preset = default(field.is_required(), field.get_default(call_default_factory=True))
    return f"| `{key}` | {kind} | {preset} | {meaning} |"


def default(required: bool, value: Any) -> str:
    """The default as YAML, or that there is none."""
    if required or value is PydanticUndefined:
        return "required"
    return "`null`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def type_name(annotation: Any) -> str:
    """A type as a reader of YAML calls it, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0]) + bounds(annotation.__metadata__)
    if origin in (Union, UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    names = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path", type(None): "null"}
    if origin is list:
        return f"list of {'mappings' if get_origin(arguments[0]) is dict else type_name(arguments[0])}"
    return "mapping" if origin is dict else names[annotation]


def bounds(metadata: tuple[Any, ...]) -> str:
    """The limits of an annotated number."""
    found: dict[str, Any] = {}
    for item in metadata:
        for constraint in item.metadata if isinstance(item, FieldInfo) else [item]:
            match constraint:
                case Ge(limit):
                    found["≥"] = limit
                case Gt(limit):
                    found[">"] = limit
                case Le(limit):
                    found["≤"] = limit
                case Lt(limit):
                    found["<"] = limit
    return "".join(f" {sign} {limit}" for sign, limit in found.items())


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` compare them; 1 if one is out of date."""
    status = 0
    for name, lines in (("configuration.md", configuration()), ("verl_settings.md", verl_settings())):
        path = Path(__file__).with_name(name)
        text = "\n".join(lines).rstrip() + "\n"
        if arguments != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{path} is out of date: run `make golden`\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
