"""The pool's record of requests in flight."""

from __future__ import annotations

from tidemill.rollout.engine_pool import LoadMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_loads_are_changes_since_the_last_report_and_close_ones_become_one() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for seconds, engine, requests in [(0, "a", 1), (0.01, "a", 2), (1, "b", 1), (1, "a", 1)]:
        clock.now += seconds
        meter.note(engine, requests)
    assert meter.take() == {"a": [(100.0, 2), (102.01, 1)], "b": [(101.01, 1)]}
    assert meter.take() == {}
