from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from tidemill_pipelines.catalogue import PIPELINES, checked, pairs, pipeline_of, readme

from tidemill.steps.request import DEFAULTS


def test_parameters_are_texts_and_wrong_ones_are_named() -> None:
    given = checked("post_training", pairs(["config=a: 1", "rollout_engines=4"]))
    assert given == {"config": "a: 1", "rollout_engines": "4"}
    with pytest.raises(ValueError, match="post_training has no parameter engine; it has config, data_held_out"):
        checked("post_training", {"config": "", "engine": "4"})


@pytest.mark.parametrize("name", PIPELINES)
def test_form_has_the_defaults_that_the_steps_know_and_each_field_is_described(name: str) -> None:
    form = {key: value.default for key, value in inspect.signature(pipeline_of(name).pipeline_func).parameters.items()}
    form.setdefault("data_train", form.get("prompts"))
    assert {key: form[key] for key in DEFAULTS} == dict(DEFAULTS)
    assert all(isinstance(value, str) for value in form.values())
    assert all(f"- **{key}**: " in readme(name) for key in pipeline_of(name).component_spec.inputs)


def test_alphabetical_order_of_the_form_groups_the_sections_of_a_run_file() -> None:
    sections = [name.partition("_")[0] for name in sorted(DEFAULTS)]
    assert list(dict.fromkeys(sections)) == ["data", "kubernetes", "model", "reward", "rollout", "trainer"]
    assert sections == sorted(sections)


@pytest.mark.parametrize("name", PIPELINES)
def test_documentation_has_every_field_of_the_form_with_its_default(name: str) -> None:
    rows = (Path(__file__).parents[2] / "docs/kfp.md").read_text(encoding="utf-8").splitlines()
    for key, parameter in inspect.signature(pipeline_of(name).pipeline_func).parameters.items():
        [row] = [row for row in rows if row.startswith("| ") and f"`{key}`" in row.split(" | ")[0]]
        assert not parameter.default or f"`{parameter.default}`" in row.split(" | ")[1]
