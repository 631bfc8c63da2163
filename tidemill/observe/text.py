"""Text for people: without control characters, shortened, counted."""

from __future__ import annotations

import re

LONGEST = 500
"""Characters. A pipeline passes the answers of a report from step to step in one argument of a process, which is
limited to 128 KiB: 30 texts with up to six bytes per character.
"""
CUT = "\n[...]\n"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move the cursor, change colours or ring a bell; newline and tab are allowed."""


def printable(text: str) -> str:
    """The text with a replacement character in place of every control character."""
    return CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def excerpt(text: str, longest: int = LONGEST) -> str:
    """The printable text; a long one is reduced to its beginning and its end, which holds the answer.

    An excerpt of the result is the result itself.
    """
    text = printable(text.strip())
    if len(text) <= longest:
        return text
    half = (longest - len(CUT)) // 2
    return f"{text[:half].rstrip()}{CUT}{text[-half:].lstrip()}"


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from one hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
