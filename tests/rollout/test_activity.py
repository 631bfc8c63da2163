from __future__ import annotations

from tidemill.rollout.activity import IdleMeter, LoadMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_time_is_exact_over_scripted_pauses() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    # idle 2, one running 3, two running 1, one running 4, idle 5, running 5: 7 of 20
    for seconds, change in [
        (2, meter.enter), (3, meter.enter), (1, meter.leave), (4, meter.leave), (5, meter.enter), (5, None),
    ]:  # fmt: skip
        clock.now += seconds
        if change is not None:
            change()
    assert meter.read() == 7 / 20


def test_each_reading_starts_anew_in_the_middle_of_a_pause() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    clock.now += 4
    assert meter.read() == 1.0
    clock.now += 1
    meter.enter()
    clock.now += 3
    assert meter.read() == 0.25
    assert meter.read() == 0.0


def test_a_finished_run_is_not_idle() -> None:
    clock = Clock()
    meter = IdleMeter(clock)
    meter.enter()
    clock.now += 1
    meter.leave()
    meter.finish()
    clock.now += 50
    assert meter.read() == 0.0


def test_loads_are_changes_since_the_last_report_and_close_ones_become_one() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for seconds, engine, requests in [(0, "a", 1), (0.01, "a", 2), (1, "b", 1), (1, "a", 1)]:
        clock.now += seconds
        meter.note(engine, requests)
    assert meter.take() == {"a": [(100.0, 2), (102.01, 1)], "b": [(101.01, 1)]}
    assert meter.take() == {}
