"""The numbers that follow from the settings, and the list of settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from config_rig import parse

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import fields

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_yaml_of_a_config_reads_back_to_an_equal_one(path: Path) -> None:
    config = load_config(path)
    assert parse_config(config.to_yaml()) == config


def test_staleness_threshold_counts_groups_as_verl_does() -> None:
    config = parse(
        "asynchrony.staleness_threshold=0.5", "asynchrony.require_batches=2", "trainer.ppo_mini_batch_size=4"
    )
    assert (config.required_samples, config.updates_per_version, config.max_groups_between_syncs) == (8, 2, 12)


def test_threshold_loses_no_group_to_rounding() -> None:
    # (1 + 0.16) * 25 is 28.999999999999996 in floating point.
    assert parse("asynchrony.staleness_threshold=0.16", "trainer.ppo_mini_batch_size=25").max_groups_between_syncs == 29


def test_queue_holds_what_the_staleness_bound_allows() -> None:
    config = parse("asynchrony.max_staleness=2", "trainer.ppo_mini_batch_size=4")
    assert config.queue_capacity == 12


def test_total_rollout_steps_sets_the_steps_of_the_trainer() -> None:
    config = parse("trainer.steps=null", "rollout.total_rollout_steps=100", "asynchrony.require_batches=2")
    assert config.trainer.steps == 100 // (16 * 2) == 3
    assert parse_config(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "keep"),
        (["asynchrony.partial_rollout=true"], "keep"),
        (["asynchrony.partial_rollout=false"], "wait"),
        (["asynchrony.partial_rollout=true", "asynchrony.pause_mode=abort"], "abort"),
        (["asynchrony.pause_mode=wait"], "wait"),
    ],
)
def test_pause_mode_follows_from_partial_rollout(overrides: list[str], mode: str) -> None:
    assert parse(*overrides).pause_mode == mode


def test_a_sync_that_waits_for_groups_has_the_time_of_a_group() -> None:
    assert parse().publication == parse().sync
    waiting = parse("asynchrony.partial_rollout=false", "rollout.group_timeout_s=40", "sync.timeout_s=2")
    assert waiting.publication.timeout_s == 42


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().trainer.steps = 9  # type: ignore[misc]


def test_there_are_at_most_120_knobs_besides_those_of_kubernetes_and_all_are_documented() -> None:
    knobs = list(fields())
    assert len([key for key, _, _ in knobs if not key.startswith("kubernetes.")]) <= 120
    assert [key for key, owner, name in knobs if not owner.model_fields[name].description] == []


def test_the_knobs_are_those_of_the_frozen_list() -> None:
    frozen = (Path(__file__).parent / "knobs.txt").read_text(encoding="utf-8").split()
    assert [key for key, _, _ in fields()] == frozen, "a new knob needs a reason; then add it to tests/config/knobs.txt"


def test_configuration_page_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], timeout=300, check=False)
    assert done.returncode == 0


def test_page_of_settings_has_every_section_once_and_tells_mappings_from_texts() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(headings) == len(set(headings))
    assert "| `kubernetes.tolerations` | list of mappings |" in page
