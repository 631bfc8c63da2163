"""This machine as the place of a run: its capacity, and one training at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tidemill.config.asynchrony import SyncConfig
from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import (
    CheckpointError,
    ConfigError,
    RunError,
)
from tidemill.steps.provider import LocalProvider, capacities, check_capacity, claimed, count_weights, training_lock
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.server import embedded_store


def changed(config: RunConfig, *overrides: str) -> str:
    return parse_config(config.to_yaml(), overrides).to_yaml()


def test_joining_a_ray_without_its_address_is_refused(addition: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    existing = LocalProvider(parse_config(changed(addition, "cluster.provider=existing")))
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        existing.check()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    existing.check()


def test_weights_that_a_folder_has_twice_are_counted_once(tmp_path: Path) -> None:
    """Mistral publishes some models in its own format too, as `consolidated.safetensors`."""
    for name in ("model.safetensors", "consolidated.safetensors"):
        save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, tmp_path / name)
    assert count_weights(tmp_path) == 17


def test_a_run_is_trained_by_one_process_at_a_time(addition: RunConfig) -> None:
    addition.folder.mkdir(parents=True)
    for _ in range(2):
        with (
            training_lock(addition),
            pytest.raises(RunError, match=rf"^process {os.getpid()} still trains addition: wait for it, or end it"),
            training_lock(addition),
        ):
            pass


def test_newest_training_of_a_shared_store_may_commit(
    addition: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claimed(addition) as claim:
        assert claim is None, "its store lies below a folder that is locked"
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/model.safetensors").touch()
    with embedded_store(tmp_path / "shared") as server:
        monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server.access_key)
        monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server.secret_key)
        run = parse_config(changed(addition, f"store.endpoint={server.endpoint}"))
        with claimed(run) as first, claimed(run) as second:
            with open_checkpoints(run, second) as checkpoints:
                checkpoints.commit(1, tmp_path / "parts", {})
            refused = pytest.raises(CheckpointError, match="attempt 1 of addition may not commit: attempt 2")
            with open_checkpoints(run, first) as checkpoints, refused:
                checkpoints.commit(2, tmp_path / "parts", {})


def test_model_that_cannot_fit_is_refused_with_need_and_fix(addition: RunConfig) -> None:
    with pytest.raises(RunError, match=r"not enough disk.*GiB are needed.*output="):
        check_capacity(addition, weights=10**13)


def test_demo_needs_no_more_than_a_small_machine_has(addition: RunConfig) -> None:
    needs = {each.what.split()[0]: each.needed / 2**30 for each in capacities(addition, weights=135_000_000)}
    assert needs["memory"] < 8
    assert needs["disk"] < 10


def test_object_store_transport_needs_one_more_copy_in_memory(addition: RunConfig) -> None:
    through_store = addition.model_copy(update={"sync": SyncConfig(transport="object_store")})
    plain, more = (
        {capacity.what.split()[0]: capacity.needed for capacity in capacities(config, weights=1000)}
        for config in (addition, through_store)
    )
    assert (more["shared"] - plain["shared"], more["disk"] - plain["disk"]) == (2 * 1000, 2 * 2 * 1000)


def test_teardown_removes_partial_transfers(addition: RunConfig) -> None:
    for name in ("restored", "staging-0", "model"):
        (addition.folder / name).mkdir(parents=True)
        (addition.folder / name / "part").write_bytes(b"weights")
    (addition.folder / "restored.name").write_text("3")
    LocalProvider(addition).teardown()
    assert [path.name for path in addition.folder.iterdir()] == ["model"]
