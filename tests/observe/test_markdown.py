"""The report as Markdown."""

from __future__ import annotations

import re
from dataclasses import replace

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.observe.markdown import cell, links, mlflow_page, report
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
    assert "| 2 + 2 | 4 | - | 4 |" in text
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


def test_report_links_the_run_in_mlflow_and_says_that_it_was_restarted() -> None:
    text = report("a", replace(SUMMARY, restarts=2, dropped={"restart": 3}), "http://mlflow/#/experiments/1/runs/b")
    assert "[The run in MLflow](http://mlflow/#/experiments/1/runs/b)" in text
    assert "| restarts | 2, each from the newest checkpoint |" in text
    assert "dropped groups: 3 (in flight at a restart; their prompts were issued again)" in text
    assert "restart" not in report("a", SUMMARY) and "The run in MLflow" not in report("a", SUMMARY)


def test_page_of_links_has_the_run_in_mlflow_and_the_settings_in_a_drawn_table(addition: RunConfig) -> None:
    on_cluster = ["cluster.provider=kuberay", "sync.transport=object_store", "store.endpoint=http://store.ml.svc:9000"]
    config = parse_config(addition.to_yaml(), [*on_cluster, "tracking.uri=http://mlflow.ml.svc:5000"])
    text = links(config, "1a2b", "7")
    wanted = "/runs?workflowType=machine_learning&searchFilter=attributes.run_name%20%3D%20%27addition%27"
    assert f"[this run](http://127.0.0.1:5000/#/experiments/7{wanted})" in text
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert any(re.fullmatch(r"│ trainer\.steps +│ 25 +│", row) for row in rows)
    assert len({len(row) for row in rows}) == 1
    assert "http" not in mlflow_page(config, "7", "b").removeprefix("http://127.0.0.1:5000/#/experiments/7/runs/b")
    assert "this run" not in links(config, "1a2b")
