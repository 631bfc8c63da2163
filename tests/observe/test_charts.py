"""Pictures of scripted steps, by their SVG elements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from tidemill.observe.charts import (
    ADOPT_COLOR,
    COLUMNS,
    ENGINE_COLOR,
    MOST_POINTS,
    REWARD_COLOR,
    SCORE_COLOR,
    means,
    reward_svg,
    thinned,
    timeline_svg,
)
from tidemill.observe.events import Activity
from tidemill.observe.timeline import ADOPT, PHASES, Load

# Two updates, 110..114 and 120..124. Engine 0 is busy 104..112 and 122..130, engine 1 from 123 on; the end is at 126.
STEPS = [
    Activity(1, [["get_groups", 100, 110], ["update_actor", 110, 114], ["step", 100, 116]],
             {"engine 0": [[104, 2], [108, 1], [112, 0]]}),
    Activity(2, [["get_groups", 116, 120], ["update_actor", 120, 124], [ADOPT, 100, 105], ["sync", 124, 126]],
             {"engine 0": [[122, 1], [130, 0]], "engine 1": [[123, 3]]}),
]  # fmt: skip
NAMESPACE = "{http://www.w3.org/2000/svg}"


def long_run(steps: int) -> list[Activity]:
    """An update of 9 s and a sync of 1 s a step, an engine that changes a hundred times meanwhile."""
    return [
        Activity(n, [["update_actor", 10 * n, 10 * n + 9], ["sync", 10 * n + 9, 10 * n + 10]],
                 {"engine 0": [[10 * n + k / 10, k % 4] for k in range(100)]})
        for n in range(1, steps + 1)
    ]  # fmt: skip


def words(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def boxes(svg: str, color: str) -> Iterator[tuple[float, float]]:
    """Width and height of every path of a colour, without those of the legend."""
    axes = next(group for group in ElementTree.fromstring(svg).iter() if group.get("id") == "axes_1")
    for path in axes.iter(f"{NAMESPACE}path"):
        if color in path.get("style", ""):
            numbers = [float(word) for word in path.get("d", "").split() if word not in "MLz"]
            yield np.ptp(numbers[::2]), np.ptp(numbers[1::2])


def color_of(phase: str) -> str:
    return PHASES[phase][1]


def test_the_timeline_has_the_phases_to_scale_and_says_the_overlap() -> None:
    svg = timeline_svg(STEPS)
    waits, updates = (list(boxes(svg, color_of(phase))) for phase in ("get_groups", "update_actor"))
    assert [len(waits), len(updates)] == [2, 2]
    assert waits[0][0] == pytest.approx(2.5 * updates[1][0], rel=0.01)
    found = words(svg)
    assert {"trainer", "engine 0", "engine 1", "wait for groups", "groups in flight"} <= set(found)
    assert "Steps 1 to 2: engines generate during 50% of the trainer's updates, with up to 3 groups in flight" in found


def test_the_area_of_an_engine_has_the_height_of_what_it_has_in_flight() -> None:
    first, second = boxes(timeline_svg(STEPS), ENGINE_COLOR)
    assert first[1] == pytest.approx(second[1] * 2 / 3, rel=0.01)


def test_adoptions_are_a_strip_over_their_time() -> None:
    svg = timeline_svg(STEPS)
    [(_, strip)] = boxes(svg, ADOPT_COLOR)
    [(_, phase), _] = boxes(svg, color_of("update_actor"))
    assert strip == pytest.approx(phase / 4, rel=0.01)


def test_the_timeline_of_a_long_run_is_small_and_shows_the_share_of_every_phase() -> None:
    svg = timeline_svg(long_run(1000))
    assert len(svg) < 60_000
    [(_, update)], [(_, sync)] = boxes(svg, color_of("update_actor")), boxes(svg, color_of("sync"))
    assert update == pytest.approx(9 * sync, rel=0.01)
    assert {"30:00", "2:30:00"} <= set(words(svg))


def test_mean_in_flight_keeps_the_time() -> None:
    found = means([Load(104, 108, 2), Load(108, 109, 1)], 100, 110)
    assert found.sum() * 10 / COLUMNS == pytest.approx(9)
    assert (found[0], found[COLUMNS // 2], found[-1]) == (0, 2, 0)


def test_rewards_are_a_line_and_scores_are_dots() -> None:
    svg = reward_svg([(1, 0.0), (2, 0.5), (3, 1.0)], [(0, 0.25), (3, 0.75)])
    assert len(list(boxes(svg, f"stroke: {REWARD_COLOR}"))) == 1
    uses = list(ElementTree.fromstring(svg).iter(f"{NAMESPACE}use"))
    assert [SCORE_COLOR in use.get("style", "") for use in uses] == [True, True]
    assert {"0", "1", "2", "3", "step of the trainer"} <= set(words(svg))


@pytest.mark.parametrize(("rewards", "scores"), [([(1, 0.5)], []), ([], [(0, 0.5)]), ([(1, 0.5), (9, 0.5)], [])])
def test_a_single_value_can_be_seen(rewards: list[tuple[int, float]], scores: list[tuple[int, float]]) -> None:
    svg = reward_svg(rewards, scores)
    assert "nan" not in svg and (REWARD_COLOR if rewards else SCORE_COLOR) in svg


def test_a_long_run_is_drawn_by_means() -> None:
    points = [(step, float(step % 2)) for step in range(1, 4 * MOST_POINTS + 1)]
    kept, size = thinned(points)
    assert (size, len(kept), kept[0], kept[-1]) == (4, MOST_POINTS, (4, 0.5), (4 * MOST_POINTS, 0.5))
    assert thinned(points[:MOST_POINTS]) == (points[:MOST_POINTS], 1)
    assert thinned([]) == ([], 1)


def test_a_picture_is_the_same_in_every_process_and_matplotlib_is_loaded_only_for_it() -> None:
    code = (
        "import sys; from test_charts import STEPS, timeline_svg; assert 'matplotlib' not in sys.modules; "
        "sys.stdout.write(timeline_svg(STEPS))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300, cwd=Path(__file__).parent)
    assert done.stdout == timeline_svg(STEPS)
