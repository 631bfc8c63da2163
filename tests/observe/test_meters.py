"""Wall time of phases, by a clock that the test controls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tidemill.observe.meters import Timings


@dataclass
class Clock:
    now: float = 50.0

    def __call__(self) -> float:
        return self.now


def test_repeated_phases_add_up_and_a_failed_phase_counts() -> None:
    clock = Clock()
    timings = Timings(clock)
    for seconds in (1.0, 2.0):
        with timings.phase("forward"):
            clock.now += seconds
        clock.now += 0.5
    with pytest.raises(ValueError), timings.phase("sync"):
        clock.now += 4.0
        raise ValueError
    assert timings.metrics() == {"time/forward": 3.0, "time/sync": 4.0}
    assert timings.intervals == [("forward", 50.0, 51.0), ("forward", 51.5, 53.5), ("sync", 54.0, 58.0)]


def test_elapsed_includes_phases_that_have_not_ended() -> None:
    clock = Clock()
    timings = Timings(clock)
    with timings.phase("step"):
        clock.now += 2.0
        assert (timings.elapsed, timings.seconds) == (2.0, {})


def test_dated_intervals_are_in_seconds_since_the_epoch() -> None:
    clock = Clock()
    timings = Timings(clock)
    with timings.phase("pack"):
        clock.now += 2.0
    clock.now += 3.0
    assert timings.dated(1_000.0) == [("pack", 995.0, 997.0)]
