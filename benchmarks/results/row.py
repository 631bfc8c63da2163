"""A measured number beside a peer's or a limit, and the file of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the result; ratio is ours over other, or, where less is better, as the benchmark says.

    None where there is nothing to divide by.
    """

    name: str
    unit: str
    ours: float
    other: float
    ratio: float | None


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """All rows as a JSON list."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
