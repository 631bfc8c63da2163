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
FIELDS: Sequence[tuple[str, int, int, Sequence[str]]] = (
    ("second", 0, 59, ()),
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of month", 1, 31, ()),
    ("month", 1, 12, MONTHS),
    ("day of week", 0, 6, DAYS),
)
"""Name, first number, last number, and names of the numbers of each field."""
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
    words = text.lower().split()
    if len(words) == len(FIELDS) - 1:
        words = ["0", *words]
    if len(words) != len(FIELDS):
        fix = 'For example "0 2 * * *", every day at 02:00 UTC.'
        raise ConfigError("cron", text, "five fields, minute first, or six, second first", fix)
    for word, (name, first, last, names) in zip(words, FIELDS, strict=True):
        if not all(is_part(part, first, last, names) for part in word.split(",")):
            allowed = f"{name} from {first} to {last}, as 5, 1-5, */2 or 1,3"
            raise ConfigError("cron", text, allowed, f"{word!r} is not.")
    return " ".join(words)


def is_part(part: str, first: int, last: int, names: Sequence[str]) -> bool:
    """Whether KFP takes one part of a field with these numbers and names."""
    found = PART.fullmatch(part)
    if found is None or (found["step"] is not None and int(found["step"]) == 0):
        return False
    if found["low"] is None:
        return True
    low = number(found["low"], first, names)
    high = low if found["high"] is None else number(found["high"], first, names)
    return first <= low <= high <= last


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
    fields = expression.split()
    unrestricted = any(part[0] in "*?" for field in (fields[3], fields[5]) for part in field.split(","))
    times = croniter(
        expression.replace("?", "*"),
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
