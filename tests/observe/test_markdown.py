"""The report as Markdown."""

from __future__ import annotations

import re
from dataclasses import replace

from tidemill.observe.markdown import cell, report
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
    peak_memory_bytes=2**30,
    checkpoint_uri="s3://tidemill/runs/a/checkpoints/3",
    model_uri="s3://tidemill/runs/a/model/3",
    model_version="a/1",
    mlflow_run_id=None,
    samples=(Sample("2 + 2", None, "4", "4"),),
    dropped={"stale": 2, "never": 0},
)


def test_report_has_score_facts_answers_and_the_command() -> None:
    text = report("run-a", SUMMARY)
    assert "# run-a" in text and "0.250  -\\>  0.750  (+0.500)" in text
    assert "| peak memory | 1.00 GiB |" in text and "| MLflow run | (not tracked) |" in text
    assert "| 2 + 2 | - | 4 | 4 |" in text
    assert "- dropped groups: 2 (stale)" in text and "never" not in text
    assert "`tidemill generate models:/a/1 PROMPT`" in text


def test_a_model_without_a_version_is_named_by_its_uri() -> None:
    text = report("run-a", replace(SUMMARY, model_version=None))
    assert "`tidemill generate s3://tidemill/runs/a/model/3 PROMPT`" in text and "models:/" not in text
    assert "tidemill generate" not in report("run-a", replace(SUMMARY, model_version=None, model_uri=None))


def test_a_text_stays_in_its_cell() -> None:
    hostile = "a | b\n\n# c\n```\nd\n```\n<script> *e* _f_ [g](javascript:h) ![i](http://x/y.png)"
    text = cell(hostile)
    assert "\n" not in text
    assert not re.search(r"(?<!\\)[|`*_<>\[\]#]", text)
    assert re.sub(r"\\(.)", r"\1", text) == " ".join(hostile.split())


def test_a_long_text_is_cut_in_the_middle() -> None:
    assert re.fullmatch(r"first x+ \\\[\.\.\.\\\] x+ last", cell("first " + "x" * 10_000 + " last"))
    assert len(cell("x" * 10_000)) < 400
