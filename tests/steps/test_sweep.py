"""The variants of a sweep, and which one is best."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from trained_rig import Model, evaluation, summary

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.observe.report import Summary
from tidemill.steps.request import Request
from tidemill.steps.sweep import (
    MAX_VARIANTS,
    VariantResult,
    finish_variant,
    select_best,
    table,
    validate_sweep,
    variant_configs,
)
from tidemill.tracking.mlflow_runs import open_sweep
from tidemill.tracking.mlflow_server import make_client, tracking_uri

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
ARGUMENT_BYTES = 128 * 1024  # of one argument on Linux; KFP hands all inputs of a step over as one


def result(name: str, score: float | None) -> VariantResult:
    return VariantResult(name, 0.25, score, 3)


def test_variant_is_a_run_of_its_own_with_its_own_settings(addition: RunConfig) -> None:
    lines = "trainer.learning_rate=1.0e-5 seed=3\n\n# a remark\ndata.system_prompt='Be brief, please'\n"
    first, second = variant_configs(Request(addition.to_yaml(), "seed=1", run_name="rates"), lines)
    assert (first.name, first.seed, first.trainer.learning_rate) == ("rates-v1", 3, 1e-5)
    assert (second.name, second.seed, second.data.system_prompt) == ("rates-v2", 1, "Be brief, please")
    assert first.registered_model == second.registered_model == "addition"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", f"variants = 0. Allowed: 1 to {MAX_VARIANTS}"),
        ("seed=1\n" * (MAX_VARIANTS + 1), f"variants = {MAX_VARIANTS + 1}"),
        ("seed='1", "No closing quotation"),
        ("trainer.stepz=3", "trainer.stepz = 3"),
        ("faster", "override = 'faster'"),
        ("[seed=1, 2]", "variants = .* one entry a line, or"),
        ("[seed=1", "variants = .* one entry a line, or"),
        ("seed=1 output=elsewhere", "variants = 'seed=1 output=elsewhere'. Allowed: overrides other than output"),
        ("store.bucket=other", "overrides other than store.bucket"),
        ("name=other", "overrides other than name"),
    ],
)
def test_variants_that_cannot_be_run_are_refused(addition: RunConfig, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(variant_configs(Request(addition.to_yaml()), lines))


def test_variants_of_a_form_with_fields_of_one_line_are_a_list(addition: RunConfig) -> None:
    one_line = '[seed=3 trainer.steps=9, "rollout.stop=[x] seed=4"]'
    first, second = variant_configs(Request(addition.to_yaml(), run_name="rates"), one_line)
    assert (first.seed, first.trainer.steps) == (3, 9)
    assert (second.name, second.seed, list(second.rollout.stop)) == ("rates-v2", 4, ["x"])


def test_variant_cannot_set_what_a_field_of_the_form_sets(addition: RunConfig) -> None:
    lines = "rollout.engines=1\nrollout.engines=2"
    assert [each.rollout.engines for each in variant_configs(Request(addition.to_yaml()), lines)] == [1, 2]
    with pytest.raises(ConfigError, match=r"other than rollout\.engines, which a field of the form sets"):
        list(variant_configs(Request(addition.to_yaml(), rollout_engines="2"), lines))


def test_sweep_without_held_out_prompts_has_no_best(addition: RunConfig, tmp_path: Path) -> None:
    lines = "data.held_out=null\nregistry.min_score=null\nevaluation.every=0"
    with pytest.raises(ConfigError, match=r"data\.held_out = null. Allowed: held-out prompts, which select"):
        validate_sweep(Request(addition.to_yaml(), lines), "seed=1", str(tmp_path / "links.md"))


def test_table_has_the_best_first_and_one_without_a_score_last() -> None:
    variants = [result(f"s-v{n}", score) for n, score in ((1, None), (2, 0.5), (3, 0.75))]
    rows = table(variants, variants[2]).splitlines()[-3:]
    assert [row.split(" | ")[0] for row in rows] == ["| s-v3 (best)", "| s-v2", "| s-v1"]
    assert rows[0].endswith("| 0.250 | 0.750 | 3 |") and rows[2].endswith("| 0.250 | - | 3 |")


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_variant_without_a_score_is_never_the_best(bad: float | None) -> None:
    variants = [result("s-v1", bad), result("s-v2", 0.5), result("s-v3", bad)]
    assert max(variants, key=lambda each: each.score).name == "s-v2"


def test_results_of_the_largest_sweep_are_one_argument_of_a_command() -> None:
    name = "a" * 60
    results = [json.dumps(asdict(result(f"{name}-v{n}", 0.123456789))) for n in range(MAX_VARIANTS)]
    assert len(json.dumps({"parameterValues": {"results": results}})) < ARGUMENT_BYTES / 8


def finished(run: RunConfig, name: str, score: float | None) -> str:
    """What `finish_variant` returns for a variant of a sweep."""
    variant = run.model_copy(update={"name": name, "registry": run.registry.model_copy(update={"model": "addition"})})
    before = summary(variant, 0.25, f"s3://tidemill/runs/{name}/model/25")
    return finish_variant(
        variant.to_yaml(), before.to_json(), "null" if score is None else evaluation(score), {}.__setitem__
    )


@pytest.mark.parametrize(
    ("scores", "best"), [((0.5, 0.75, None), "s-v2"), ((0.75, 0.75, 0.5), "s-v1"), ((None, float("nan"), 0.5), "s-v3")]
)
def test_best_variant_is_registered_from_its_stored_summary(
    trained: RunConfig, tmp_path: Path, scores: tuple[float | None, ...], best: str
) -> None:
    sweep = Request(trained.to_yaml(), run_name="s")
    open_sweep(sweep.settings(), ["s-v1", "s-v2", "s-v3"])
    results = [finished(trained, f"s-v{n}", score) for n, score in enumerate(scores, start=1)]
    assert max(len(result) for result in results) < 200
    model = Model(tmp_path / "model.json")
    final = Summary.from_json(select_best(sweep, results, str(tmp_path / "r.md"), str(tmp_path / "r.html"), model))
    assert (final.model_uri, final.model_version) == (f"s3://tidemill/runs/{best}/model/25", "addition/1")
    assert f"| {best} (best) |" in (tmp_path / "r.md").read_text()
    runs = {run.info.run_name: run for run in make_client(tracking_uri(trained)).search_runs(["1"])}
    assert runs["s"].data.tags["tidemill.best"] == best
    assert len(runs["s"].data.metrics) == sum(score is not None for score in scores)
    assert {runs[f"s-v{n}"].data.tags["mlflow.parentRunId"] for n in (1, 2, 3)} == {runs["s"].info.run_id}


def test_sweep_without_any_score_registers_nothing_and_says_why(trained: RunConfig, tmp_path: Path) -> None:
    strict = trained.model_copy(update={"registry": trained.registry.model_copy(update={"min_score": 0.5})})
    results = [finished(strict, f"s-v{n}", None) for n in (1, 2)]
    files = (str(tmp_path / "r.md"), str(tmp_path / "r.html"))
    final = select_best(Request(strict.to_yaml(), run_name="s"), results, *files, Model(tmp_path / "model.json"))
    assert Summary.from_json(final).model_version is None
    assert "no held-out score" in Summary.from_json(final).reason("model_version")
