"""What can become of a setting of verl, and of its value."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Becomes:
    """Has a counterpart.

    Attributes:
        key: of ours.
        convert: the value; None leaves ours out; raises ValueError, with what is allowed, for what has no counterpart.
    """

    key: str
    convert: Convert = lambda value: value


@dataclass(frozen=True, slots=True)
class Only:
    """Has one meaning here, and must have that there.

    Attributes:
        values: that mean the same.
        why: others cannot be taken over.
    """

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Changes nothing of what is learned, or is always so here.

    Attributes:
        why: it is left out.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Never:
    """Has no counterpart, whatever its value is.

    Attributes:
        why: it has none, and what to do.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Part:
    """Makes one of our settings together with others: see `convert.combined`.

    Attributes:
        key: of ours.
        kinds: types that the value may have.
        words: that the value may be, instead of a number.
    """

    key: str
    kinds: tuple[type[int] | type[float], ...] = (int,)
    words: tuple[str, ...] = ()


NUMBER, FLAG = (int, float), (bool,)
Rule = Becomes | Only | LeftOut | Never | Part


def positive(value: Any) -> int:
    """A number of things of which there is at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number from 1 on")
    return value


def group(value: Any) -> int:
    """Responses per prompt."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError("a number from 2 on: an advantage is relative to the other responses of the group")
    return value


def single_file(value: Any) -> str:
    """One file of a list of one."""
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        raise ValueError("one file: put the rows of all into one")
    return str(files[0])


def either(values: Iterable[Any]) -> str:
    """Values in words, as a command of verl has them: nothing is `null`."""
    return " or ".join("null" if value is None else str(value) for value in values)


def one_of(table: Mapping[Any, Any]) -> Convert:
    """A value by name."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Hashable) or value not in table:
            raise ValueError(either(table))
        return table[value]

    return convert


def frequency(value: Any) -> int:
    """Never is -1 in verl, and 0 here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return max(0, value)


def limit(value: Any) -> int | None:
    """No limit is -1 in verl, and null here."""
    return frequency(value) or None


def slug(value: Any) -> str:
    """A name as ours may be."""
    return re.sub("[^a-z0-9]+", "-", str(value).lower()).strip("-")[:63].strip("-") or "run"
