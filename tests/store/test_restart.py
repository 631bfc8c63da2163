"""What a checkpoint says of the run besides its tensors, and for which settings it is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tidemill.config import RunConfig
from tidemill.errors import ConfigError
from tidemill.protocols import Answer, Evaluation
from tidemill.store.checkpoint import Checkpoints
from tidemill.store.object_store import ObjectStore
from tidemill.store.restart import Restart, find_restart, identity
from tidemill.train.trainer import Position


def restart_of(config: RunConfig) -> Restart:
    position = Position(step=7, version=3, groups=112, response_tokens=900, max_age=1, seconds=12.5, unsynced=1)
    before = Evaluation(0, 0.25, (Answer("3 + 4", "8", "7", 0.0), Answer("1", "1", None, 0.5)), {"too_long": 1})
    return Restart(position, {"cursor": 120, "waiting": [3, 9]}, "mlflow-run", identity(config), before)


def changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """The settings with other ones in some sections."""
    tree = config.model_dump(mode="json")
    return RunConfig.model_validate(
        tree | {name: tree[name] | values if isinstance(values, dict) else values for name, values in sections.items()}
    )


def test_a_restart_reads_back_from_json(run_config: RunConfig) -> None:
    restart = restart_of(run_config)
    assert Restart.from_state(json.loads(json.dumps(restart.to_state()))) == restart
    restart.check(run_config)


@pytest.mark.parametrize(
    ("key", "settings", "begun"),
    [
        ("model", {"model": "another/model"}, "'some/model'"),
        ("seed", {"seed": 1}, "0"),
        ("data.train", {"data": {"train": "other.jsonl"}}, "'train.jsonl'"),
        ("data.shuffle", {"data": {"shuffle": False}}, "true"),
        ("rewards", {"rewards": [{"function": "math_verify"}]}, "exact_number"),
        ("algorithm.clip_high", {"algorithm": {"clip_high": 0.28}}, "0.2"),
        ("asynchrony.max_staleness", {"asynchrony": {"max_staleness": 2}}, "1"),
        ("asynchrony.require_batches", {"asynchrony": {"require_batches": 2}}, "1"),
    ],
)
def test_another_experiment_under_the_same_name_is_refused_with_the_setting_that_makes_it_one(
    run_config: RunConfig, key: str, settings: dict[str, Any], begun: str
) -> None:
    with pytest.raises(ConfigError, match="with which addition was begun") as failure:
        restart_of(run_config).check(changed(run_config, **settings))
    assert failure.value.key == key
    assert begun in failure.value.allowed


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": {"steps": 40}},
        {"trainer": {"ranks": 2, "learning_rate": 1e-5}},
        {"rollout": {"engines": 3}},
        {"checkpoint": {"every": 3}, "sync": {"timeout_s": 30.0}},
    ],
)
def test_a_run_may_go_on_longer_and_on_other_machines(run_config: RunConfig, settings: dict[str, Any]) -> None:
    restart_of(run_config).check(changed(run_config, **settings))


def test_the_newest_commit_is_what_a_run_goes_on_from(weed: ObjectStore, run_config: RunConfig, tmp_path: Path) -> None:
    checkpoints = Checkpoints(weed, run_config.name, 2)
    assert find_restart(run_config, checkpoints) is None
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.safetensors").write_bytes(b"weights")
    restart = restart_of(run_config)
    checkpoints.commit(3, tmp_path / "parts", restart.to_state())
    assert find_restart(run_config, checkpoints) == restart
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low"):
        find_restart(changed(run_config, algorithm={"clip_low": 0.1}), checkpoints)
