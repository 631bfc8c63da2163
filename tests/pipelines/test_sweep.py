"""The variants of a sweep, and which one is best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.config import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.report import Summary
from tidemill.pipeline.request import Request
from tidemill.pipeline.sweep import MOST, Outcome, begin_sweep, table, variants

SUMMARY = Summary(3, 0.25, 0.5, 1.0, 1.0, 1.0, None, None, None, None, None, None, None, None)


def outcome(config: RunConfig, name: str, score: float | None) -> Outcome:
    text = config.model_copy(update={"name": name}).to_yaml()
    summary = replace(SUMMARY, held_out_after=score).to_json()
    return Outcome.read(json.dumps({"config": text, "summary": summary}))


def test_variant_is_a_run_of_its_own_with_its_own_settings(addition: RunConfig) -> None:
    lines = "trainer.learning_rate=1.0e-5 seed=3\n\n# a remark\ndata.system_prompt='Be brief, please'\n"
    first, second = variants(Request(addition.to_yaml(), "seed=1", run_name="rates"), lines)
    assert (first.name, first.seed, first.trainer.learning_rate) == ("rates-v1", 3, 1e-5)
    assert (second.name, second.seed, second.data.system_prompt) == ("rates-v2", 1, "Be brief, please")
    assert first.registered_model == second.registered_model == "addition"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", f"variants = 0: allowed is 1 to {MOST}"),
        ("seed=1\n" * (MOST + 1), f"variants = {MOST + 1}"),
        ("seed='1", "No closing quotation"),
        ("trainer.stepz=3", "trainer.stepz = 3"),
        ("faster", "override = 'faster'"),
    ],
)
def test_variants_that_cannot_be_run_are_refused(addition: RunConfig, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(variants(Request(addition.to_yaml()), lines))


def test_sweep_without_held_out_prompts_has_no_best(addition: RunConfig, tmp_path: Path) -> None:
    lines = "data.held_out=null\nregistry.min_score=null\nevaluation.every=0"
    with pytest.raises(ConfigError, match=r"data\.held_out = None: allowed is held-out prompts: they say"):
        begin_sweep(Request(addition.to_yaml(), lines), "seed=1", str(tmp_path / "links.md"))


def test_table_has_the_best_first_and_one_without_a_score_last(addition: RunConfig) -> None:
    outcomes = [outcome(addition, f"s-v{n}", score) for n, score in ((1, None), (2, 0.5), (3, 0.75))]
    rows = table(outcomes, outcomes[2]).splitlines()[-3:]
    assert [row.split(" | ")[0] for row in rows] == ["| s-v3 (best)", "| s-v2", "| s-v1"]
    assert rows[0].endswith("| 0.250 | 0.750 | 3 |") and rows[2].endswith("| 0.250 | - | 3 |")
