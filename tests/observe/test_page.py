from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from tidemill.observe.page import MOST_POINTS, Curves, Frame, chart, page, thinned, ticks
from tidemill.observe.report import Sample, Summary

SUMMARY = Summary(
    steps=3,
    held_out_before=0.25,
    held_out_after=0.75,
    train_seconds=61.0,
    total_seconds=120.0,
    tokens_per_second=1234.0,
    trainer_idle=0.1,
    rollouter_idle=None,
    max_age=1,
    peak_memory_bytes=None,
    checkpoint_uri=None,
    model_uri="s3://tidemill/runs/a/model/3",
    model_version="a/1",
    mlflow_run_id=None,
    samples=(Sample("<b>2 + 2</b>", None, "4", "4"),),
    skipped={"too long": 2, "empty": 0},
)
CURVES = Curves(rewards=((1, 0.0), (2, 0.5), (3, 1.0)), scores=((0, 0.25), (3, 0.75)))


def test_page_tells_before_and_after_and_the_way_between() -> None:
    text = page("run-a", SUMMARY, CURVES)
    assert "0.250 &rarr; 0.750" in text and "+0.500" in text
    assert text.count("<circle") == 2 and "<polyline" in text
    assert "skipped prompts: 2 (too long)" in text and "empty" not in text
    assert "(no checkpoint was written)" in text


def test_page_needs_nothing_else_and_shows_prompts_as_they_are() -> None:
    text = page("<run>", SUMMARY, CURVES)
    assert not re.search(r"<(script|link|img)|src=|url\(|@import", text)
    assert "<b>" not in text and "&lt;b&gt;2 + 2&lt;/b&gt;" in text and "&lt;run&gt;" in text


def test_page_without_scores_and_steps_says_so() -> None:
    text = page("a", replace(SUMMARY, held_out_before=None, held_out_after=None, samples=()), Curves())
    assert text.count("(data.held_out is not set)") == 1
    assert "(no step was recorded)" in text and "Held-out answers" not in text


def test_page_says_why_a_run_was_stopped() -> None:
    assert "stopped early" not in page("a", SUMMARY, CURVES)
    assert "reward &lt;is&gt; flat" in page("a", replace(SUMMARY, stopped="reward <is> flat"), CURVES)


def test_page_follows_the_theme_and_the_width_of_its_reader() -> None:
    text = page("a", SUMMARY, CURVES)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert set(re.findall(r"var\((--\w+)\)", text)) == set(re.findall(r"(--\w+):", text))


def drawing(curves: Curves) -> ET.Element:
    text = chart(curves)
    return ET.fromstring(text[text.index("<svg") :])


def line(curves: Curves) -> list[tuple[float, ...]]:
    [found] = [each for each in drawing(curves).iter() if each.tag.endswith("polyline")]
    return [tuple(map(float, point.split(","))) for point in found.attrib["points"].split()]


def test_chart_is_well_formed_and_its_line_goes_from_corner_to_corner() -> None:
    points = line(CURVES)
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True)
    assert (points[-1], heights[0]) == ((696.0, 12.0), 220.0)


def test_legend_names_only_what_is_drawn() -> None:
    assert "training reward" in chart(CURVES) and "held-out" in chart(CURVES)
    assert "held-out" not in chart(replace(CURVES, scores=()))
    assert "training reward" not in chart(replace(CURVES, rewards=()))


def test_a_single_step_can_be_seen() -> None:
    assert "stroke-width:7" in chart(Curves(rewards=((1, 0.5),)))
    assert len(line(Curves(rewards=((1, 0.5),)))) == 2


def test_a_long_run_is_drawn_by_means_that_are_named() -> None:
    points = [(step, float(step % 2)) for step in range(1, 4 * MOST_POINTS + 1)]
    kept, many = thinned(points)
    assert (many, len(kept), kept[0], kept[-1]) == (4, MOST_POINTS, (4, 0.5), (4 * MOST_POINTS, 0.5))
    assert "mean of every 4 steps" in chart(Curves(rewards=points))
    assert thinned(points[:MOST_POINTS]) == (points[:MOST_POINTS], 1)


@pytest.mark.parametrize(
    ("low", "high", "every", "labels"),
    [(0.05, 1.0, 0.2, "0.2 0.4 0.6 0.8 1.0"), (-3.0, 2.0, 1.0, "-3 -2 -1 0 1 2"),
     (0.0, 0.003, 0.001, "0.000 0.001 0.002 0.003"),
     (0.0, 1.0, 1.0, "0 1")],
)  # fmt: skip
def test_ticks_are_round_and_all_different(low: float, high: float, every: float, labels: str) -> None:
    assert [label for _, label in ticks(low, high, every)] == labels.split()


@pytest.mark.parametrize("points", [[(5, 0.5)], [(1, 0.5), (9, 0.5)]])
def test_value_that_does_not_change_has_a_place(points: list[tuple[int, float]]) -> None:
    _, y = Frame.around(points).place(points[0])
    assert y == 116.0


@pytest.mark.parametrize("low", [0.05, -7.0, 0.0])
def test_the_grid_reaches_beyond_every_value(low: float) -> None:
    frame = Frame.around([(1, low), (2, 0.97)])
    assert frame.low <= low and frame.high >= 0.97
