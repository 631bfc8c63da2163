"""Text of prompts, answers and errors as a person may see it: it must not steer a terminal or fill a page."""

from __future__ import annotations

import re

LONGEST = 1200
"""Characters; the answers of a report pass between the steps of a pipeline, as arguments of their processes."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move the cursor, change colours or ring a bell; not newline and tab."""


def printable(text: str) -> str:
    """The text with a mark in the place of every control character."""
    return CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def excerpt(text: str, longest: int = LONGEST) -> str:
    """The text, printable; of a long one its beginning and its end, where the answer stands."""
    text = printable(text.strip())
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
