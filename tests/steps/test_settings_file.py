"""The settings in the folder of a run, which only those that were accepted replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import RewardError, RunError
from tidemill.steps.settings_file import accept, keep
from tidemill.steps.steps import validate


def changed(config: RunConfig, *overrides: str) -> str:
    return parse_config(config.to_yaml(), overrides).to_yaml()


@pytest.fixture
def kept(addition: RunConfig) -> Path:
    settings = keep(addition)
    (addition.folder / "summary.json").write_text("{}")
    return settings


def test_settings_that_are_accepted_are_those_that_a_run_goes_on_with(addition: RunConfig, kept: Path) -> None:
    validate(changed(addition, "trainer.steps=99"))
    assert load_config(kept).trainer.steps == 99
    assert not (addition.folder / "summary.json").exists()


def test_settings_that_are_refused_leave_a_run_as_it_was(addition: RunConfig, kept: Path) -> None:
    with pytest.raises(RewardError, match="exact_numbr"):
        validate(changed(addition, "rewards.0.function=exact_numbr"))
    assert load_config(kept) == addition
    assert (addition.folder / "summary.json").exists()


def test_run_whose_settings_are_kept_elsewhere_gets_no_file(addition: RunConfig) -> None:
    validate(addition.to_yaml())
    assert [path.name for path in addition.folder.iterdir()] == ["events.jsonl"]


def test_settings_that_cannot_be_written_keep_those_before(addition: RunConfig, kept: Path) -> None:
    kept.with_name(".config.yaml.partial").mkdir()
    with pytest.raises(RunError, match="cannot write to"):
        accept(addition.model_copy(update={"seed": 9}))
    assert load_config(kept) == addition
