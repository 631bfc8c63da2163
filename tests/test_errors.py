"""Errors name a value as a run file has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tidemill.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        ([True, None, "x", 1e-06], "[true, null, 'x', 1.0e-06]"),
        ({"a": {"b-c": False}, "two words": ["it's"]}, "{a: {b-c: false}, 'two words': ['it''s']}"),
        (("a", 2), "['a', 2]"),
        (float("-inf"), "-.inf"),
        ("null", "'null'"),
        (r"\d+", r"'\d+'"),
        ("two\nlines", '"two\\nlines"'),
        ("\ud800", '"\\ud800"'),
        (Path("/a"), "'/a'"),
        ({}, "{}"),
    ],
)
def test_a_refused_value_is_shown_as_in_a_run_file(value: object, shown: str) -> None:
    assert str(ConfigError("k", value, "another", "Correct it.")) == f"k = {shown}. Allowed: another. Correct it."
    assert yaml.safe_load(shown) == (str(value) if isinstance(value, Path) else json.loads(json.dumps(value)))
