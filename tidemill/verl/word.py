"""Words of a shell script, and values of which only the shell knows what they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

SETTING = re.compile(r"(~|\+{0,2})([A-Za-z_]\w*(?:\.[\w-]+)*)(=|$)")
# Blanks out of a variable that stands without quotes: they part words of a command, but not of an assignment.
BLANKS, MARKS = " \t\n", "\ue000\ue001\ue002"
MARKED, UNMARKED = str.maketrans(BLANKS, MARKS), str.maketrans(MARKS, BLANKS)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only the shell could tell, and why."""

    why: str


Text = str | Unknown


@dataclass(slots=True)
class Word:
    """A word of a command.

    Attributes:
        raw: as it is written.
        text: what the shell makes of it, with `MARKS` where it may be parted.
        elements: words of the array that it assigns.
    """

    raw: str = ""
    text: Text = ""
    elements: list[Word] | None = None

    @property
    def setting(self) -> re.Match[str] | None:
        """The word as a setting: `KEY=...` or `~KEY`; quotes may stand around all of it."""
        return SETTING.match(self.text if isinstance(self.text, str) else self.raw.strip("\"'"))

    @property
    def whole(self) -> Text:
        """What the shell makes of it where words are not parted."""
        return self.text.translate(UNMARKED) if isinstance(self.text, str) else self.text

    def unquoted(self) -> Word:
        """The same without quotes, so that its blanks part it."""
        return Word(self.raw, self.text.translate(MARKED) if isinstance(self.text, str) else self.text)

    def parted(self) -> list[Word]:
        """The words that the shell makes of it in a command; none of a variable that is empty."""
        if isinstance(self.text, Unknown) or (self.text and not set(MARKS) & set(self.text)):
            return [self]
        if not self.text and set("\"'") & set(self.raw):
            return [self]
        return [Word(part, part) for part in re.split(f"[{MARKS}]+", self.text) if part]

    def add(self, raw: str, text: Text) -> None:
        """Append a piece."""
        self.raw += raw
        if isinstance(self.text, str):
            self.text = self.text + text if isinstance(text, str) else text
