from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tidemill.cli.cron import next_times, six_fields
from tidemill.errors import ConfigError

NOW = datetime(2026, 11, 29, 23, 50, tzinfo=UTC)  # a Sunday


def times(text: str, count: int = 3) -> list[str]:
    return [f"{time:%a %Y-%m-%d %H:%M:%S}" for time in next_times(six_fields(text), count, NOW)]


def test_five_fields_begin_with_the_minute_and_are_sent_as_six() -> None:
    assert six_fields("0 2 * * *") == "0 0 2 * * *"
    assert times("0 2 * * *", 2) == ["Mon 2026-11-30 02:00:00", "Tue 2026-12-01 02:00:00"]
    assert times("0 2 * * *") == times("0 0 2 * * *")


def test_names_lists_ranges_and_steps() -> None:
    assert times("*/20 9-17 * * mon-fri", 4) == [
        "Mon 2026-11-30 09:00:00",
        "Mon 2026-11-30 09:20:00",
        "Mon 2026-11-30 09:40:00",
        "Mon 2026-11-30 10:00:00",
    ]
    assert times("0 0 1,15 jan ?", 2) == ["Fri 2027-01-01 00:00:00", "Fri 2027-01-15 00:00:00"]
    assert times("55/2 * * * *", 2) == ["Sun 2026-11-29 23:55:00", "Sun 2026-11-29 23:57:00"]


def test_of_two_restricted_days_one_is_enough() -> None:
    assert times("0 0 1 * mon", 3) == ["Mon 2026-11-30 00:00:00", "Tue 2026-12-01 00:00:00", "Mon 2026-12-07 00:00:00"]


def test_day_with_a_star_and_a_step_is_no_restriction() -> None:
    """What KFP's own parser (robfig/cron 1.2.0) answers."""
    assert times("0 0 */2 * mon", 2) == ["Mon 2026-12-07 00:00:00", "Mon 2026-12-21 00:00:00"]
    assert times("0 0 1 * */2", 2) == ["Tue 2026-12-01 00:00:00", "Thu 2027-04-01 00:00:00"]
    assert times("0 0 *,5 * mon", 2) == ["Mon 2026-11-30 00:00:00", "Mon 2026-12-07 00:00:00"]


def test_day_that_does_not_come_has_no_time() -> None:
    assert times("0 0 30 2 *") == []
    assert times("0 0 29 2 *", 1) == ["Tue 2028-02-29 00:00:00"]


def test_words_and_steps_are_those_of_kfp() -> None:
    assert times("0 0 ? JAN Mon", 1) == ["Mon 2027-01-04 00:00:00"]
    assert times("*/90 ?/12 * * *", 2) == ["Mon 2026-11-30 00:00:00", "Mon 2026-11-30 12:00:00"]
    assert times("30 0 12 1 dec ?", 1) == ["Tue 2026-12-01 12:00:30"]


def test_range_of_one_number_is_that_number() -> None:
    assert times("0 0 * * 1-mon", 2) == ["Mon 2026-11-30 00:00:00", "Mon 2026-12-07 00:00:00"]
    assert times("0 23-23 25 dec-12 *", 1) == ["Fri 2026-12-25 23:00:00"]


def test_range_over_all_numbers_is_a_restriction() -> None:
    assert times("0 0 1-31 * mon", 2) == ["Mon 2026-11-30 00:00:00", "Tue 2026-12-01 00:00:00"]


def test_moment_itself_is_over() -> None:
    assert times("50 23 * * *", 1) == ["Mon 2026-11-30 23:50:00"]


NO_TIMES = ["", "* * *", "@daily", "60 * * * *", "0 24 * * *", "5-1 * * * *", "*/0 * * * *", "0 0 0 * *", "0 0 * * 7"]
MORE_OF_CRONITER = [
    "0 0 L * *",
    "0 0 * * 5#2",
    "0 0 * * L5",
    "H * * * *",
    "R * * * *",
    "0 0 0 1 1 * 2027",
    "0 0 * * sat-mon",
]
ODD_NUMBERS = ["*/-5 * * * *", "1_0 * * * *", "+5 * * * *", "-1 * * * *", "1,, * * * *", "\u0663 * * * *"]


@pytest.mark.parametrize("text", [*NO_TIMES, *MORE_OF_CRONITER, *ODD_NUMBERS])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cron = "):
        six_fields(text)
