from __future__ import annotations

import re
from dataclasses import replace

from tidemill.observe.charts import MOST_POINTS
from tidemill.observe.page import Curves, chart, page
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


def test_page_has_scores_before_and_after_and_the_chart() -> None:
    text = page("run-a", SUMMARY, CURVES)
    assert "0.250 &rarr; 0.750" in text and "+0.500" in text
    assert text.count("<svg") == text.count("</svg>") == 1
    assert "skipped prompts: 2 (too long)" in text and "empty" not in text
    assert "(no checkpoint was written)" in text


def test_page_is_self_contained_and_escapes_texts() -> None:
    text = page("<run>", SUMMARY, CURVES)
    assert not re.search(r"<(script|link|img)|src=|url\((?!#)|@import", text)
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


def test_legend_names_only_what_is_drawn() -> None:
    assert "reward, mean" in chart(CURVES) and "held-out" in chart(CURVES)
    assert "held-out" not in chart(replace(CURVES, scores=()))
    assert "reward, mean" not in chart(replace(CURVES, rewards=()))


def test_legend_says_how_many_steps_a_point_is_the_mean_of() -> None:
    points = [(step, float(step % 2)) for step in range(1, 4 * MOST_POINTS + 1)]
    assert "mean of every 4 steps" in chart(Curves(rewards=points))
    assert "mean of each step" in chart(CURVES)


def test_the_chart_has_the_colours_of_the_page() -> None:
    text = chart(CURVES)
    assert not re.search(r"#[0-9a-f]{6}", text)
    assert {"--line", "--dot", "--soft", "--rule"} == set(re.findall(r"var\((--\w+)\)", text))


def test_every_column_of_the_answers_is_shown_on_a_narrow_page() -> None:
    text = page("a", SUMMARY, CURVES)
    assert re.findall(r'data-name="(\w+)"', text) == ["prompt", "expected", "before", "after"]
    assert "content: attr(data-name)" in text and "min-width" not in text
    assert "white-space: nowrap" in text  # an entry of the legend stays in one line


def test_page_links_the_run_in_mlflow() -> None:
    assert 'href="http://mlflow/#/a?b=1&amp;c"' in page("a", SUMMARY, CURVES, "http://mlflow/#/a?b=1&c")
    assert "<a " not in page("a", SUMMARY, CURVES)
