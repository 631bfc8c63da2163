"""Text of prompts, answers and errors as a person may see it: it must not steer a terminal or fill a page."""

from __future__ import annotations

import re

LONGEST = 500
"""Characters. The answers of a report pass between the steps of a pipeline in one argument of a process, which takes
128 KiB: 30 texts, with up to six bytes a character.
"""
CUT = "\n[...]\n"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move the cursor, change colours or ring a bell; not newline and tab."""


def printable(text: str) -> str:
    """The text with a mark in the place of every control character."""
    return CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def counted(number: int, noun: str) -> str:
    """So many of a thing: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def excerpt(text: str, longest: int = LONGEST) -> str:
    """The text, printable; of a long one its beginning and its end, where the answer stands.

    What this returns stays as it is when it is cut once more.
    """
    text = printable(text.strip())
    if len(text) <= longest:
        return text
    half = (longest - len(CUT)) // 2
    return f"{text[:half].rstrip()}{CUT}{text[-half:].lstrip()}"


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
