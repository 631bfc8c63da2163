from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from tidemill.observe.page import Curves, Frame, chart, page
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
    assert "skipped prompts: too long" in text and "empty" not in text
    assert "(no checkpoint was written)" in text


def test_page_needs_nothing_else_and_shows_prompts_as_they_are() -> None:
    text = page("<run>", SUMMARY, CURVES)
    assert not re.search(r"<(script|link|img)|src=|url\(", text)
    assert "<b>" not in text and "&lt;b&gt;2 + 2&lt;/b&gt;" in text and "&lt;run&gt;" in text


def test_page_without_scores_and_steps_says_so() -> None:
    text = page("a", replace(SUMMARY, held_out_before=None, held_out_after=None, samples=()), Curves())
    assert text.count("(data.held_out is not set)") == 2
    assert "(no step was recorded)" in text and "Held-out answers" not in text


def test_chart_is_well_formed_and_its_line_goes_from_corner_to_corner() -> None:
    root = ET.fromstring(chart(CURVES))
    [line] = [each for each in root.iter() if each.tag.endswith("polyline")]
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True)
    assert (points[-1], heights[0]) == ((676.0, 44.0), 216.0)


@pytest.mark.parametrize("points", [[(5, 0.5)], [(1, 0.5), (9, 0.5)]])
def test_value_that_does_not_change_has_a_place(points: list[tuple[int, float]]) -> None:
    _, y = Frame.around(points).place(points[0])
    assert y == 130.0
