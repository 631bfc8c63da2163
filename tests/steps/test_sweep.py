"""The variants of a sweep, and which one is best."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.steps.request import Request
from tidemill.steps.sweep import MOST, Outcome, table, validate_sweep, variants

ARGUMENT_BYTES = 128 * 1024  # of one argument on Linux; KFP hands all inputs of a step over as one


def outcome(name: str, score: float | None) -> Outcome:
    return Outcome(name, 0.25, score, 3)


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
        ("[seed=1, 2]", "variants = .* one entry a line, or"),
        ("[seed=1", "variants = .* one entry a line, or"),
        ("seed=1 output=elsewhere", "variants = 'seed=1 output=elsewhere': allowed is overrides other than output"),
        ("store.bucket=other", "overrides other than store.bucket"),
        ("name=other", "overrides other than name"),
    ],
)
def test_variants_that_cannot_be_run_are_refused(addition: RunConfig, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(variants(Request(addition.to_yaml()), lines))


def test_variants_of_a_form_with_fields_of_one_line_are_a_list(addition: RunConfig) -> None:
    one_line = '[seed=3 trainer.steps=9, "rollout.stop=[x] seed=4"]'
    first, second = variants(Request(addition.to_yaml(), run_name="rates"), one_line)
    assert (first.seed, first.trainer.steps) == (3, 9)
    assert (second.name, second.seed, list(second.rollout.stop)) == ("rates-v2", 4, ["x"])


def test_setting_of_a_variant_that_a_field_of_the_form_overrules_is_refused(addition: RunConfig) -> None:
    lines = "rollout.engines=1\nrollout.engines=2"
    assert [each.rollout.engines for each in variants(Request(addition.to_yaml()), lines)] == [1, 2]
    with pytest.raises(ConfigError, match=r"other than rollout\.engines, which a field of the form sets"):
        list(variants(Request(addition.to_yaml(), engines=1), lines))


def test_sweep_without_held_out_prompts_has_no_best(addition: RunConfig, tmp_path: Path) -> None:
    lines = "data.held_out=null\nregistry.min_score=null\nevaluation.every=0"
    with pytest.raises(ConfigError, match=r"data\.held_out = null: allowed is held-out prompts: they say"):
        validate_sweep(Request(addition.to_yaml(), lines), "seed=1", str(tmp_path / "links.md"))


def test_table_has_the_best_first_and_one_without_a_score_last() -> None:
    outcomes = [outcome(f"s-v{n}", score) for n, score in ((1, None), (2, 0.5), (3, 0.75))]
    rows = table(outcomes, outcomes[2]).splitlines()[-3:]
    assert [row.split(" | ")[0] for row in rows] == ["| s-v3 (best)", "| s-v2", "| s-v1"]
    assert rows[0].endswith("| 0.250 | 0.750 | 3 |") and rows[2].endswith("| 0.250 | - | 3 |")


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_variant_without_a_score_is_never_the_best(bad: float | None) -> None:
    outcomes = [outcome("s-v1", bad), outcome("s-v2", 0.5), outcome("s-v3", bad)]
    assert max(outcomes, key=lambda each: each.score).name == "s-v2"


def test_results_of_the_largest_sweep_are_one_argument_of_a_command() -> None:
    name = "a" * 60
    results = [json.dumps(asdict(outcome(f"{name}-v{n}", 0.123456789))) for n in range(MOST)]
    assert len(json.dumps({"parameterValues": {"results": results}})) < ARGUMENT_BYTES / 8
