"""Cron expressions as KFP takes them: six fields, seconds first, in UTC unless its server is set otherwise.

KFP reads five fields as six whose last one is missing: it would start `0 2 * * *` every hour. So the usual five fields
are sent as six, second 0 first. KFP's parser is robfig/cron 1.2.0; croniter accepts more, which is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice

from croniter import CroniterBadDateError, croniter

from tidemill.errors import ConfigError

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
Field = tuple[str, int, int, Sequence[str]]
"""Name, first number, last number, and names of its numbers."""
FIELDS: Sequence[Field] = (
    ("second", 0, 59, ()),
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, MONTHS),
    ("day of week", 0, 6, DAYS),
)
PART = re.compile(r"(?:[*?]|(?P<low>\w+)(?:-(?P<high>\w+))?)(?:/(?P<step>\d+))?", re.ASCII)
"""One part of a field, whose parts are separated by commas: `*`, `?`, `5`, `mon-fri`, `*/15`, `10-40/10`."""
HORIZON_YEARS = 5


def six_fields(text: str) -> str:
    """A cron expression as KFP takes it.

    Args:
        text: five fields, minute first, or six, second first.

    Raises:
        ConfigError: it is something else.
    """
    words = text.split()
    if len(words) == len(FIELDS) - 1:
        words = ["0", *words]
    if len(words) != len(FIELDS):
        fix = 'For example "0 2 * * *", every day at 02:00 UTC.'
        raise ConfigError("cron", text, "five fields, minute first, or six, second first", fix)
    for word, field in zip(words, FIELDS, strict=True):
        if not all(values(part, field) for part in word.split(",")):
            name, first, last, _ = field
            allowed = f"{name} from {first} to {last}, as 5, 1-5, */2 or 1,3"
            raise ConfigError("cron", text, allowed, f"{word!r} is not.")
    return " ".join(words)


def values(part: str, field: Field) -> range:
    """The numbers that one part of a field allows; none if KFP does not take it."""
    _, first, last, names = field
    found = PART.fullmatch(part.lower())
    if found is None:
        return range(0)
    low, high = first, last
    if found["low"] is not None:
        low = number(found["low"], first, names)
        if found["high"] is not None:
            high = number(found["high"], first, names)
        elif found["step"] is None:
            high = low
    step = int(found["step"] or 1)
    return range(low, high + 1, step) if step and first <= low <= high <= last else range(0)


def number(word: str, first: int, names: Sequence[str]) -> int:
    """The value of a number or a name such as `mon`; -1 for another word."""
    if word in names:
        return first + names.index(word)
    return int(word) if word.isdecimal() else -1


def next_times(expression: str, count: int, now: datetime) -> Sequence[datetime]:
    """The next times of six fields, in UTC; none beyond `HORIZON_YEARS`.

    A day must satisfy the day of month and the day of week. If both are restricted, one of them is enough, as in every
    cron; robfig/cron counts a field with `*` or `?` in any part, such as `*/2`, as not restricted.
    """
    words = [word.split(",") for word in expression.split()]
    unrestricted = any(part[0] in "*?" for word in (words[3], words[5]) for part in word)
    # Plain lists of numbers, because croniter reads a range such as 5-5 as the whole field.
    lists = [
        ",".join(str(value) for part in word for value in values(part, field))
        for word, field in zip(words, FIELDS, strict=True)
    ]
    times = croniter(
        " ".join(lists),
        now.astimezone(UTC),
        ret_type=datetime,
        day_or=not unrestricted,
        second_at_beginning=True,
        max_years_between_matches=HORIZON_YEARS,
    )
    try:
        return list(islice(times, count))
    except CroniterBadDateError:
        return []
