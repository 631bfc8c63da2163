"""Cron expressions as KFP takes them: six fields, seconds first, in UTC unless its server is set otherwise.

KFP reads an expression of five fields as one whose last field is missing, not whose first is: `0 2 * * *` would start a
run every hour. So the usual five fields are taken here and sent as six.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tidemill.errors import ConfigError

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
HORIZON = timedelta(days=5 * 366)


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its name, its range, and the names of its numbers from the first on."""

    name: str
    first: int
    last: int
    words: Sequence[str] = ()


FIELDS = (
    Field("second", 0, 59),
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31),
    Field("month", 1, 12, MONTHS),
    Field("day of week", 0, 6, DAYS),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """Times by their fields.

    Attributes:
        text: six fields, as KFP takes them.
        values: what each field allows.
    """

    text: str
    values: tuple[frozenset[int], ...]

    @classmethod
    def parse(cls, text: str) -> Cron:
        """Read five fields, minute first, or six, second first.

        Raises:
            ConfigError: it is something else.
        """
        words = text.split()
        if len(words) == len(FIELDS) - 1:
            words = ["0", *words]
        if len(words) != len(FIELDS):
            fix = 'For example "0 2 * * *", every day at 02:00 UTC.'
            raise ConfigError("cron", text, "five fields from the minute on, or six from the second on", fix)
        values = tuple(allowed(word, field, text) for word, field in zip(words, FIELDS, strict=True))
        return cls(" ".join(words), values)

    def matches(self, day: datetime) -> bool:
        """Whether it has a time on this day. With both days restricted one of them is enough, as in every cron; a star
        with a step, such as `*/2`, counts as none for that.
        """
        dates, months, weekdays = self.values[3:]
        in_date, in_week = day.day in dates, day.isoweekday() % 7 in weekdays
        either = is_open(self.text.split()[3]) or is_open(self.text.split()[5])
        return day.month in months and (in_date and in_week if either else in_date or in_week)

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Its times after a moment, for some years."""
        day, end = moment.replace(hour=0, minute=0, second=0, microsecond=0), moment + HORIZON
        seconds, minutes, hours = (sorted(values) for values in self.values[:3])
        while day < end:
            if self.matches(day):
                for hour in hours:
                    for minute in minutes:
                        for second in seconds:
                            time = day.replace(hour=hour, minute=minute, second=second)
                            if time > moment:
                                yield time
            day += timedelta(days=1)


def any_of(word: str) -> bool:
    """Whether a field says nothing."""
    return word in ("*", "?")


def is_open(word: str) -> bool:
    """Whether a field of days says `*` or `?` anywhere, also with a step."""
    return any(any_of(part.partition("/")[0]) for part in word.split(","))


def allowed(word: str, field: Field, text: str) -> frozenset[int]:
    """The numbers that one field allows: `*`, `?`, `5`, `1-5`, `*/15`, `10-40/10`, and lists of these.

    Raises:
        ConfigError: it is something else.
    """
    numbers: set[int] = set()
    for part in word.lower().split(","):
        span, slash, step = part.partition("/")
        low, dash, high = span.partition("-")
        try:
            first = field.first if any_of(span) else number(low, field)
            last = number(high, field) if dash else field.last if any_of(span) or slash else first
            numbers |= set(range(first, last + 1, decimal(step) if slash else 1))
            ok = field.first <= first <= last <= field.last
        except ValueError:
            ok = False
        if not ok:
            form = f"{field.name} from {field.first} to {field.last}, as 5, 1-5, */2 or 1,3"
            raise ConfigError("cron", text, form, f"{word!r} is not.")
    return frozenset(numbers)


def number(word: str, field: Field) -> int:
    """A number or a name, such as `mon`."""
    return field.first + field.words.index(word) if word in field.words else decimal(word)


def decimal(word: str) -> int:
    """A number in digits alone: Python takes `-5`, `1_0` and those of other scripts too, and KFP does not.

    Raises:
        ValueError: it is something else.
    """
    if not (word.isascii() and word.isdecimal()):
        raise ValueError(word)
    return int(word)


def next_times(cron: Cron, count: int, now: datetime) -> Sequence[datetime]:
    """The next times of a schedule, in UTC."""
    times = cron.after(now.astimezone(UTC))
    return [time for time, _ in zip(times, range(count), strict=False)]
