"""When a run wants more engines, and when fewer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.rollout.elasticity import VERSIONS, Elasticity

SECONDS = st.floats(0.01, 100.0)


def versions(policy: Elasticity, engines: int, generate_s: float, train_s: float, count: int) -> list[int]:
    """Engines after each of so many versions, which one engine generates in `generate_s`."""
    history = []
    for _ in range(count):
        seconds = max(train_s, generate_s / engines)
        policy.step(seconds, 1 - train_s / seconds, 1 - generate_s / engines / seconds)
        engines += policy.version(engines)
        history.append(engines)
    return history


@given(st.integers(1, 8), st.integers(0, 12), SECONDS, SECONDS, st.integers(0, 12))
def test_under_a_steady_load_it_moves_one_way_within_its_bounds_and_then_rests(
    smallest: int, more: int, generate_s: float, train_s: float, start: int
) -> None:
    policy, engines = Elasticity(smallest, smallest + more), smallest + min(start, more)
    history = versions(policy, engines, generate_s, train_s, VERSIONS * (more + 2))
    assert all(smallest <= count <= smallest + more for count in history)
    assert sorted(history) in (history, history[::-1])
    assert len(set(history[-VERSIONS:])) == 1


@given(st.integers(2, 12), SECONDS)
def test_where_it_rests_no_side_waits_much_unless_a_bound_keeps_it(largest: int, ratio: float) -> None:
    last = versions(Elasticity(1, largest), 1, ratio, 1.0, VERSIONS * largest * 2)[-1]
    waits = 1 - 1 / max(1.0, ratio / last)
    assert waits < 0.2 or last == largest
    assert last == 1 or ratio / (last - 1) > 0.9


def test_a_change_takes_several_versions_in_a_row() -> None:
    policy = Elasticity(1, 4)
    shares = [0.9] * (VERSIONS - 1) + [0.0] + [0.9] * VERSIONS
    changes = []
    for share in shares:
        policy.step(10.0, share, 0.0)
        changes.append(policy.version(2))
    assert changes == [0] * (len(shares) - 1) + [1]


def test_steps_of_a_version_count_by_their_time() -> None:
    policy = Elasticity(1, 4)
    for _ in range(VERSIONS):
        policy.step(1.0, 1.0, 0.0)
        policy.step(9.0, 0.0, 0.0)  # 10 % in all
        assert policy.version(2) == 0


@pytest.mark.parametrize("engines", [1, 4])
def test_a_version_without_a_step_says_nothing(engines: int) -> None:
    assert [Elasticity(1, 4).version(engines) for _ in range(VERSIONS + 1)] == [0] * (VERSIONS + 1)
