"""The processes below an engine, in words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tidemill.inference.engine_processes import cause_of_death

CASES: list[tuple[Mapping[str, int], str]] = [
    ({"Core": -9}, "its process Core was killed by SIGKILL (often because memory ran out: see `dmesg`)"),
    ({"Core": -15}, "its process Core was killed by SIGTERM"),
    ({"Core": 1, "Core2": -64}, "its process Core ended with exit code 1, its process Core2 was killed by SIGRTMAX"),
    ({"Core": -50}, "its process Core was killed by signal 50"),
    ({}, "its core stopped working; the engine's log says why"),
]


@pytest.mark.parametrize(("ended", "text"), CASES)
def test_the_end_of_processes_is_told_in_words(ended: Mapping[str, int], text: str) -> None:
    assert cause_of_death(ended) == text


def test_an_illegal_instruction_is_explained() -> None:
    text = cause_of_death({"EngineCore": -4})
    assert text.startswith(
        "its process EngineCore was killed by SIGILL (an instruction that this processor does not have"
    )
    assert "a prompt of a single token: use a longer prompt" in text
