"""The folder of a run: its name, its settings, its lock, and the failures of its steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tidemill.config.reading import load_config, parse_config
from tidemill.config.run import RunConfig
from tidemill.config.storage import StoreConfig
from tidemill.driver.failure import Failure
from tidemill.errors import ConfigError, EngineError, RewardError, RunError, StoreError, TidemillError
from tidemill.steps.run_folder import existing_run, new_run, output_lock, prepare_folder, step, write_settings
from tidemill.steps.validate import validate_run
from tidemill.store.checkpoint import open_checkpoints
from tidemill.store.server import embedded_store

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/addition.yaml"


def changed(config: RunConfig, *overrides: str) -> str:
    return parse_config(config.to_yaml(), overrides).to_yaml()


@pytest.fixture
def kept(addition: RunConfig) -> Path:
    settings = write_settings(addition)
    (addition.folder / "summary.json").write_text("{}")
    return settings


def test_valid_settings_replace_those_of_the_run(addition: RunConfig, kept: Path) -> None:
    validate_run(parse_config(changed(addition, "trainer.steps=99")))
    assert load_config(kept).trainer.steps == 99
    assert not (addition.folder / "summary.json").exists()


def test_invalid_settings_leave_the_run_unchanged(addition: RunConfig, kept: Path) -> None:
    with pytest.raises(RewardError, match="exact_numbr"):
        validate_run(parse_config(changed(addition, "rewards.0.function=exact_numbr")))
    assert load_config(kept) == addition
    assert (addition.folder / "summary.json").exists()


def test_run_without_a_settings_file_gets_none(addition: RunConfig) -> None:
    validate_run(addition)
    assert [path.name for path in addition.folder.iterdir()] == ["events.jsonl"]


def test_settings_that_cannot_be_written_keep_those_before(addition: RunConfig, kept: Path) -> None:
    kept.with_name(".config.yaml.partial").mkdir()
    with pytest.raises(RunError, match="cannot write to"):
        validate_run(addition.model_copy(update={"seed": 9}))
    assert load_config(kept) == addition


@pytest.fixture
def example() -> RunConfig:
    return load_config(EXAMPLE)


def moved(config: RunConfig, output: Path) -> RunConfig:
    return config.model_copy(update={"output": output})


def test_every_start_gets_a_name_and_a_folder_of_its_own(example: RunConfig, tmp_path: Path) -> None:
    names = [new_run(moved(example, tmp_path / "runs")).name for _ in range(3)]
    assert names == ["addition-1", "addition-2", "addition-3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names


def test_name_of_a_checkpoint_in_the_store_is_taken(example: RunConfig, tmp_path: Path) -> None:
    first = new_run(moved(example, tmp_path / "runs"))
    (first.folder / "part").write_text("weights")
    with open_checkpoints(first) as checkpoints:
        checkpoints.commit(1, first.folder, {})
    shutil.rmtree(first.folder)
    assert new_run(moved(example, tmp_path / "runs")).name == "addition-2"


def test_machines_that_share_a_store_give_no_name_twice(
    example: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_store(tmp_path / "shared") as server:
        monkeypatch.setenv("TIDEMILL_S3_ACCESS_KEY", server.access_key)
        monkeypatch.setenv("TIDEMILL_S3_SECRET_KEY", server.secret_key)
        shared = example.model_copy(update={"store": StoreConfig(endpoint=server.endpoint)})
        names = [new_run(moved(shared, tmp_path / machine)).name for machine in ("one", "two", "one")]
    assert names == ["addition-1", "addition-2", "addition-3"]


def test_runs_of_one_config_share_a_registered_model(example: RunConfig, tmp_path: Path) -> None:
    assert new_run(moved(example, tmp_path)).registered_model == "addition"


def test_output_that_is_a_file_is_refused(example: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match=r"cannot make|not a folder"):
        new_run(moved(example, tmp_path / "runs"))


def test_name_that_leaves_no_room_for_a_number_is_refused(example: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^name = "):
        new_run(example.model_copy(update={"name": "a" * 63, "output": tmp_path}))


def test_unknown_run_is_refused_with_those_that_exist(example: RunConfig, tmp_path: Path) -> None:
    config = new_run(moved(example, tmp_path))
    (config.folder / "config.yaml").write_text(config.to_yaml())
    assert existing_run("addition-1", tmp_path, ["trainer.steps=30"]).trainer.steps == 30
    with pytest.raises(ConfigError, match="addition-1"):
        existing_run("addition-7", tmp_path, [])


@pytest.mark.parametrize("change", ["name=other", "output=elsewhere"])
def test_resumed_run_keeps_name_and_output(addition: RunConfig, change: str) -> None:
    prepare_folder(addition)
    with pytest.raises(ConfigError, match=change.replace("=", " = '")):
        existing_run("addition", addition.output, [change])


def test_moved_run_is_resumed_in_its_new_folder(addition: RunConfig, tmp_path: Path) -> None:
    prepare_folder(addition)
    addition.output.rename(tmp_path / "moved: here")
    assert existing_run("addition", tmp_path / "moved: here", []).output == tmp_path / "moved: here"
    (tmp_path / "moved: here/addition").rename(tmp_path / "moved: here/other")
    with pytest.raises(ConfigError, match="the run's own name, addition"):
        existing_run("other", tmp_path / "moved: here", [])


def test_second_run_below_the_same_folder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    with (
        output_lock(tmp_path, "addition-1"),
        pytest.raises(RunError, match=r"addition-1 \(process \d+\) still uses"),
        output_lock(tmp_path, "addition-2"),
    ):
        pass
    with output_lock(tmp_path, "addition-3"):
        pass


def test_start_that_cannot_write_keeps_the_settings_of_the_attempt_before(addition: RunConfig) -> None:
    settings = prepare_folder(addition)
    before = settings.read_text()
    settings.with_name(".config.yaml.partial").mkdir()
    with pytest.raises(RunError, match="cannot write to"):
        prepare_folder(addition.model_copy(update={"seed": 9}))
    assert settings.read_text() == before


def test_new_attempt_forgets_how_the_last_one_ended(addition: RunConfig) -> None:
    prepare_folder(addition)
    Failure.of("train", ValueError("x")).write(addition.folder)
    (addition.folder / "summary.json").write_text("{}")
    prepare_folder(addition)
    assert [path.name for path in addition.folder.iterdir()] == ["config.yaml"]


def test_try_after_a_permanent_failure_fails_at_once_with_its_message(addition: RunConfig) -> None:
    with pytest.raises(RewardError), step("train", addition):
        raise RewardError("the reward is broken")
    first = Failure.read(addition.folder)
    with pytest.raises(TidemillError, match=r"^the reward is broken$"), step("train", addition):
        pytest.fail("it was tried again")
    assert Failure.read(addition.folder) == first


def test_step_runs_again_after_a_new_validation(addition: RunConfig) -> None:
    for name in ("validate", "train"):
        with pytest.raises(RewardError), step(name, addition):
            raise RewardError("the reward is broken")
    done: list[str] = []
    for name in ("validate", "train"):
        with step(name, addition):
            done.append(name)
    assert done == ["validate", "train"]


@pytest.mark.parametrize("error", [StoreError("away"), EngineError("died"), KeyError("a fault of ours")])
def test_step_is_retried_after_a_retryable_or_unexpected_failure(addition: RunConfig, error: Exception) -> None:
    with pytest.raises(type(error)), step("train", addition):
        raise error
    with step("train", addition):
        pass
    assert Failure.read(addition.folder) is None
