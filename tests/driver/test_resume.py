"""The state of a restart, and the settings on which checkpoints depend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.driver.resume import IDENTITY, Restart, check_fit, check_identity, find_restart, identity
from tidemill.errors import ConfigError
from tidemill.protocols import Answer, Evaluation
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.object_store import ObjectStore
from tidemill.train.trainer import Position


def restart_of(config: RunConfig) -> Restart:
    position = Position(step=7, version=3, groups=112, response_tokens=900, max_age=1, seconds=12.5, unsynced=1)
    before = Evaluation(0, 0.25, (Answer("3 + 4", "8", "7", 0.0), Answer("1", "1", None, 0.5)), {"too_long": 1})
    return Restart(position, {"cursor": 120, "waiting": [3, 9]}, "mlflow-run", identity(config), before)


def changed(config: RunConfig, override: str) -> RunConfig:
    return parse_config(config.to_yaml(), [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "asynchrony.max_staleness=2",
            r"asynchrony\.max_staleness = 2. Allowed: 1, the value at the start of addition\. ",
        ),
        ("asynchrony.partial_rollout=false", r"asynchrony\.partial_rollout = false. Allowed: null, the value at"),
        ("trainer.ppo_mini_batch_size=8", r"trainer\.ppo_mini_batch_size = 8. Allowed: 16, the value at"),
        ("rewards.0.options={a: 1}", r"rewards\.0\.options = {a: 1}. Allowed: {}, the value at"),
        ("rewards=[{function: exact_number}, {function: a:b}]", r"rewards = \[.*. Allowed: \[{function: 'exact_num"),
        ("data.epochs=3", r"data\.epochs = 3. Allowed: null, the value at .* keep the value, or start a new run"),
        ("seed=1", r"seed = 1. Allowed: 0, the value at"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(addition: RunConfig, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{message}"):
        check_identity(changed(addition, override), identity(addition))


@pytest.mark.parametrize(
    "override",
    [
        "trainer.steps=99",
        "trainer.learning_rate=1.0e-5",
        "rollout.engines=2",
        "rewards.0.timeout_s=60",
        "queue.capacity=64",
    ],
)
def test_other_settings_may_change(addition: RunConfig, override: str) -> None:
    check_identity(changed(addition, override), identity(addition))


def test_a_setting_that_the_checkpoint_does_not_name_may_differ(addition: RunConfig) -> None:
    saved = {key: value for key, value in identity(addition).items() if key != "trainer"}
    check_identity(changed(addition, "trainer.ppo_mini_batch_size=8"), saved)


def test_the_settings_are_compared_without_tensors(addition: RunConfig, store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    checkpoints = Checkpoints(store, addition.name, 2)
    check_fit(addition, checkpoints)
    checkpoints.commit(1, tmp_path, restart_of(addition).to_state())
    place = checkpoints.manifest(1).folder
    store.put_bytes(f"{place}/model.safetensors", b"damaged")  # of the same size
    check_fit(addition, checkpoints)
    with pytest.raises(ConfigError, match=r"^algorithm\.kl_loss_coef = 0\.5. Allowed: 0\.0"):
        check_fit(changed(addition, "algorithm.kl_loss_coef=0.5"), checkpoints)
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume = 'never'. Allowed: auto"):
        check_fit(changed(addition, "checkpoint.resume=never"), checkpoints)
    check_fit(changed(addition, "trainer.steps=7"), checkpoints)
    with pytest.raises(ConfigError, match=r"^trainer\.steps = 6. Allowed: at least 7, the steps that addition has"):
        check_fit(changed(addition, "trainer.steps=6"), checkpoints)


def test_a_restart_reads_back_from_json(addition: RunConfig) -> None:
    restart = restart_of(addition)
    assert Restart.from_state(json.loads(json.dumps(restart.to_state()))) == restart


def test_a_run_resumes_from_the_newest_commit(addition: RunConfig, store: ObjectStore, tmp_path: Path) -> None:
    checkpoints = Checkpoints(store, addition.name, 2)
    assert find_restart(addition, checkpoints) is None
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    restart = restart_of(addition)
    checkpoints.commit(3, tmp_path, restart.to_state())
    assert find_restart(addition, checkpoints) == restart
    with pytest.raises(ConfigError, match=r"^algorithm\.clip_ratio_low"):
        find_restart(changed(addition, "algorithm.clip_ratio_low=0.1"), checkpoints)


def test_the_documentation_lists_the_fixed_settings() -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    [told] = [part for part in page.split("\n\n") if "--resume NAME" in part]
    names = {section: inner for section, inner in IDENTITY.items() if inner is not True}
    assert names == {"trainer": {"ppo_mini_batch_size"}}
    assert all(f"`{section}`" in told for section in IDENTITY.keys() - names)
    assert "`trainer.ppo_mini_batch_size`" in told and "`timeout_s`" in told
