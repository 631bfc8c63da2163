"""The summary file, and the report on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tidemill.errors import DataError
from tidemill.observe.report import Sample, Summary, render, shortened
from tidemill.observe.text import counted, excerpt
from tidemill.protocols import Answer

SUMMARY = Summary(
    steps=25,
    held_out_before=0.1,
    held_out_after=0.85,
    train_seconds=330.0,
    total_seconds=505.0,
    tokens_per_second=412.3,
    trainer_idle=0.08,
    rollouter_idle=0.02,
    max_age=1,
    peak_memory_bytes=3 * 2**30,
    checkpoint_uri="s3://tidemill/runs/addition/step-25",
    model_uri="s3://tidemill/models/addition/25",
    model_version="addition/3",
    mlflow_run_id="0a1b",
    samples=(Sample("What is [34] + 58?", "about 82", "92", "92"), Sample("1 + 1", None, "2", None)),
    skipped={"too long": 2, "quarantined": 0},
    dropped={"stale": 3},
    phase_seconds={"start engines": 57.0},
)


def shown(summary: Summary) -> str:
    stream = io.StringIO()
    render(summary, Console(file=stream, width=80), "tidemill generate addition", "tidemill ui addition")
    return stream.getvalue()


def test_a_summary_survives_its_file(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path / "run/summary.json")
    assert Summary.read(tmp_path / "run/summary.json") == SUMMARY
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"steps": 1, "samples": []}', '{"samples": [{"a": 1}]}'])
def test_a_file_that_is_not_a_summary_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(DataError, match="not a summary of a run"):
        Summary.read(tmp_path / "summary.json")
    with pytest.raises(DataError, match="not a readable summary"):
        Summary.read(tmp_path / "none.json")


def test_the_report_shows_before_after_and_where_the_model_is() -> None:
    text = shown(SUMMARY)
    assert "0.100  ->  0.850  (+0.750)" in text
    for part in ("What is [34]", "about 82", "addition/3", "s3://tidemill/models/addition/25", "3.00 GiB", "8.0%"):
        assert part in text
    assert text.splitlines()[-1] == "  tidemill ui addition"
    assert max(map(len, text.splitlines())) <= 80


def test_nouns_are_singular_or_plural() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert "1 version behind" in shown(SUMMARY)
    assert "2 versions behind" in shown(replace(SUMMARY, max_age=2))


def test_only_reasons_that_happened_get_a_line() -> None:
    text = shown(SUMMARY)
    assert "skipped prompts: 2 (too long)" in text
    assert "dropped groups: 3 (stale)" in text
    assert "quarantined" not in text
    assert "masked" not in shown(replace(SUMMARY, metrics={"staleness/masked_tokens": 0.0, "response/tokens": 9000.0}))


def test_masked_tokens_are_shown_with_the_number_of_sampled_ones() -> None:
    text = shown(replace(SUMMARY, metrics={"staleness/masked_tokens": 1234.0, "response/tokens": 9000.0}))
    assert "masked tokens: 1,234 of 9,000 (too old, in the last attempt)" in text


def test_a_missing_value_says_why() -> None:
    refused = "held-out score 0.41 is below registry.min_score 0.5"
    text = shown(replace(SUMMARY, model_version=None, checkpoint_uri=None, missing={"model_version": refused}))
    assert f"({refused})" in text
    assert "(no checkpoint was written)" in text


def test_a_run_without_held_out_data_says_so_once() -> None:
    text = shown(replace(SUMMARY, held_out_before=None, held_out_after=None, samples=()))
    assert "Held-out score  (data.held_out is not set)\n" in text
    assert "->" not in text


def test_an_answer_cannot_steer_the_terminal() -> None:
    asked = shortened(Answer("2 + 2\x1b[2J", "\x1b]0;title\x07four\x9b1m", "4\r", 1.0))
    text = shown(replace(SUMMARY, samples=(Sample(asked.prompt, asked.response, None, asked.expected),)))
    assert "2 + 2\ufffd[2J" in text and "four" in text
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\r"}


def test_a_long_answer_is_cut_in_the_middle() -> None:
    kept = shortened(Answer("p", "first " + "x" * 10_000 + " last", None, 0.0)).response
    assert kept.startswith("first ") and kept.endswith(" last") and len(kept) < 1300
    assert excerpt("  as it is\n") == "as it is"


def test_why_a_run_was_stopped_is_shown_without_control_codes() -> None:
    text = shown(replace(SUMMARY, stopped="flat\x1b[31m"))
    assert "stopped early" in text and "flat\ufffd[31m" in text


def test_commands_appear_only_when_they_would_work() -> None:
    text = shown(replace(SUMMARY, model_uri=None, mlflow_run_id=None))
    assert "tidemill generate" not in text
    assert "tidemill ui" not in text
