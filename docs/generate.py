"""Writes docs/configuration.md from tidemill/config/; `--check` only says whether it is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tidemill.config.run import fields

PAGE = Path(__file__).with_name("configuration.md")
INTRODUCTION = """# Configuration

A run is one YAML file; `tidemill run FILE key.path=value ...` overrides single keys, and a number in the path
indexes a list (`rewards.0.timeout_s=5`). Unknown keys and impossible combinations are refused before anything starts.
`examples/` has files to start from; the settings a run was made with stand in `runs/NAME/config.yaml`.

`tidemill run --resume NAME key.path=value ...` goes on with other settings: more `trainer.steps`, another learning
rate, other engines. What its checkpoints depend on stays as it was, and a change is refused: `model`, `seed`, `data`,
`rewards` (but for `timeout_s`), `algorithm`, `asynchrony`, and `trainer.ppo_mini_batch_size`. Those need a new run.
Settings that are refused leave `config.yaml` as it was.

This page is generated from `tidemill/config/` (`make golden`).
"""


def page() -> str:
    """The whole page: one table for the top level and one for every section."""
    return "\n".join([INTRODUCTION, *tables()]).rstrip() + "\n"


def tables() -> Iterator[str]:
    """One table a section, in the order of the file."""
    section: type[BaseModel] | None = None
    order = list(dict.fromkeys(owner for _, owner, _ in fields()))
    for key, owner, name in sorted(fields(), key=lambda knob: order.index(knob[1])):
        if owner is not section:
            section = owner
            yield f"\n## {heading(key)}\n\n{inspect.getdoc(owner)}\n"
            yield "| Key | Type | Default | Meaning |\n|---|---|---|---|"
        yield row(key, owner, name)


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
    """What an annotated number or text is limited to."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found: dict[str, Any] = {}
    for item in metadata:
        for constraint in item.metadata if hasattr(item, "metadata") else [item]:
            found |= {sign: vars_of(constraint)[name] for name, sign in signs.items() if name in vars_of(constraint)}
    return "".join(f" {sign} {value}" for sign, value in found.items())


def vars_of(constraint: Any) -> dict[str, Any]:
    """The attributes of an annotated-types constraint, which has slots and no `__dict__`."""
    names = ("ge", "gt", "le", "lt")
    return {name: getattr(constraint, name) for name in names if hasattr(constraint, name)}


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; 1 if it is out of date."""
    text = page()
    if arguments != ["--check"]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
    if not current:
        sys.stderr.write(f"{PAGE} is out of date: run `make golden`\n")
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
