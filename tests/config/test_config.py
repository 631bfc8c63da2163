from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_rig import ON_KUBERNETES, SMALL, parse, refusal

from tidemill.config.reading import apply_override, load_config, parse_config
from tidemill.config.run import RunConfig, fields
from tidemill.config.section import DNS_LABEL, PATTERNS
from tidemill.errors import ConfigError, in_yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_required_keys_are_enough() -> None:
    assert parse().trainer.steps == 4


@pytest.mark.parametrize("key", ["name", "model", "data", "rewards", "trainer"])
def test_missing_key_is_named(key: str) -> None:
    tree = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ConfigError, match=f"^{key} = null: allowed is a value"):
        parse_config(yaml.safe_dump(tree))


def test_unknown_key_is_refused_with_the_keys_that_exist() -> None:
    error = refusal("trainer.learnin_rate=1e-5")
    assert error.key == "trainer.learnin_rate"
    assert "learning_rate" in error.allowed
    assert "spelling" in error.fix


def test_mistyped_section_is_named_and_not_the_one_that_is_then_missing() -> None:
    tree = {("trainr" if key == "trainer" else key): value for key, value in SMALL.items()}
    with pytest.raises(ConfigError, match=r"^trainr = .* Did you mean trainer\?"):
        parse_config(yaml.safe_dump(tree))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.group_size=4", "rollout.group_size"),
        ("learning_rate=1e-5", "trainer.learning_rate"),
        ("rewards.0.wieght=2", "rewards.0.weight"),
        ("rollout.max_tokens=9", "rollout.max_new_tokens"),
        ("trainer.STEPS=9", "trainer.steps"),
        ("async.max_staleness=2", "asynchrony"),
        ("rollout.temp=0.7", "rollout.temperature"),
        ("algorithm.clip_low=0.1", "algorithm.clip_ratio_low"),
        ("algorithm.clip_high=0.3", "algorithm.clip_ratio_high"),
        ("algorithm.kl_coef=0.01", "algorithm.kl_loss_coef"),
        ("rollout.colour=9", None),
    ],
)
def test_setting_that_was_probably_meant_is_told(override: str, meant: str | None) -> None:
    assert refusal(override).fix.startswith(f"Did you mean {meant}? " if meant else "Remove it")


def test_unknown_section_is_refused_with_the_sections_that_exist() -> None:
    error = refusal("trianer.steps=3")
    assert (error.key, "trainer" in error.allowed) == ("trianer", True)


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_p=1.0", "rollout.top_k=-1"])
def test_truncated_sampling_is_refused_with_its_reason(setting: str) -> None:
    error = refusal(setting)
    assert error.key == setting.partition("=")[0]
    assert "whole distribution" in error.allowed
    assert "Leave it out" in error.fix


def test_unknown_key_in_a_reward_is_refused() -> None:
    error = refusal("rewards.0.wieght=2")
    assert (error.key, "weight" in error.allowed) == ("rewards.0.wieght", True)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("trainer.steps=0", "greater than or equal to 1"),
        ("trainer.steps=many", "integer"),
        ("trainer.steps=true", "a number"),
        ("kubernetes.gpu_hours=yes", "a number"),
        ("rollout.group_size=1", "greater than or equal to 2"),
        ("rollout.temperature=0", "greater than 0"),
        ("asynchrony.max_staleness=-1", "greater than or equal to 0"),
        ("asynchrony.staleness_threshold=-0.1", "greater than or equal to 0"),
        ("queue.capacity=0", "greater than or equal to 1"),
        ("asynchrony.pause_mode=stop", "'keep', 'abort' or 'wait'"),
        ("algorithm.old_log_prob=newest", "'rollout', 'version_start' or 'decoupled'"),
        ("algorithm.behaviour_cap=0", "greater than or equal to 1"),
        ("algorithm.behaviour_cap=.inf", "finite"),
        ("trainer.learning_rate=.nan", "less than 1"),
        ("rollout.group_timeout_s=.inf", "finite"),
        ("name=Not A Name", "lower-case letters, digits and dashes"),
        ("store.bucket=B", "at least 3"),
        ("rewards=[]", "at least 1 item"),
    ],
)
def test_bad_value_is_refused_with_key_value_and_bounds(override: str, allowed: str) -> None:
    error = refusal(override)
    assert error.key == override.partition("=")[0]
    assert allowed in error.allowed


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("queue.capacity", ["queue.capacity=15"]),
        ("queue.capacity", ["queue.capacity=31", "asynchrony.require_batches=2"]),
        ("rollout.total_rollout_steps", ["rollout.total_rollout_steps=15", "trainer.steps=null"]),
        ("rollout.total_rollout_steps", ["rollout.total_rollout_steps=15"]),
        ("trainer.steps", ["rollout.total_rollout_steps=80"]),
        ("asynchrony.staleness_threshold", ["asynchrony.max_staleness=0", "asynchrony.staleness_threshold=0.5"]),
        ("asynchrony.staleness_strategy", ["asynchrony.max_staleness=0", "asynchrony.staleness_strategy=drop"]),
        ("asynchrony.staleness_strategy", ["asynchrony.max_staleness=0", "asynchrony.staleness_strategy=mask"]),
        ("asynchrony.partial_rollout", ["asynchrony.max_staleness=0", "asynchrony.partial_rollout=true"]),
        ("asynchrony.partial_rollout", ["asynchrony.staleness_threshold=0", "asynchrony.partial_rollout=true"]),
        ("asynchrony.partial_rollout", ["asynchrony.staleness_threshold=0.06", "asynchrony.partial_rollout=true"]),
        ("asynchrony.staleness_strategy", ["asynchrony.staleness_threshold=0", "asynchrony.staleness_strategy=drop"]),
        ("asynchrony.pause_mode", ["asynchrony.partial_rollout=false", "asynchrony.pause_mode=abort"]),
        ("asynchrony.pause_mode", ["asynchrony.partial_rollout=true", "asynchrony.pause_mode=wait"]),
        ("evaluation.every", ["evaluation.every=1"]),
        ("registry.min_score", ["registry.min_score=0.5"]),
        ("registry.alias", ["registry.alias=champion"]),
        ("registry.alias", ["registry.alias=v1"]),
        ("registry.alias", ["registry.alias=Latest"]),
        ("rewards.0.function", ["rewards.0.function=mine:mean"]),
        ("rewards.0.function", ["rewards.0.function=mine:größe"]),
        ("algorithm.proximal", ["algorithm.proximal=loglinear"]),
        ("algorithm.proximal", ["algorithm.old_log_prob=version_start", "algorithm.proximal=loglinear"]),
        ("algorithm.behaviour_cap", ["algorithm.behaviour_cap=5"]),
        ("algorithm.behaviour_cap", ["algorithm.old_log_prob=version_start", "algorithm.behaviour_cap=null"]),
    ],
)
def test_impossible_combination_is_refused_with_key_value_allowed_and_fix(key: str, overrides: list[str]) -> None:
    error = refusal(*overrides)
    assert error.key == key
    assert all(part in str(error) for part in (key, in_yaml(error.value), error.allowed, error.fix))
    assert error.fix


@pytest.mark.parametrize("mode", ["asynchrony.partial_rollout=true", "asynchrony.staleness_strategy=drop"])
def test_threshold_that_adds_no_group_is_named_with_its_value(mode: str) -> None:
    error = refusal("asynchrony.staleness_threshold=0.06", mode)  # of 16 groups
    assert "asynchrony.staleness_threshold = 0.06, which adds no group to the 16 of a version" in error.allowed
    assert "to null or at least 1 / 16" in error.fix
    assert parse("asynchrony.staleness_threshold=0.0625", mode).max_groups_between_syncs == 17


def test_no_number_may_be_none_at_all() -> None:
    sections = {key: owner.model_fields[name] for key, owner, name in fields() if not key.startswith("kubernetes")}
    numbers = [key.replace(".N.", ".0.") for key, field in sections.items() if "float" in str(field.annotation)]
    assert len(numbers) > 15
    for key in numbers:
        assert refusal(f"{key}=.nan", "algorithm.old_log_prob=decoupled", "data.held_out=a").key == key


def test_list_that_is_too_short_is_refused_without_words_of_the_validator() -> None:
    assert refusal("rewards=[]").allowed == "at least 1 item"


def test_empty_stop_string_is_refused_by_its_place() -> None:
    error = refusal("rollout.stop=['a', '']")
    assert (error.key, error.allowed) == ("rollout.stop.1", "at least 1 character")


def test_number_of_other_mistakes_is_said() -> None:
    assert "(1 more setting is wrong.)" in str(refusal("trainer.steps=0", "rollout.group_size=1"))


@pytest.mark.parametrize("override", ["trainer.steps", "=3", "a..b=1", "name.x=1", "rewards.7.weight=1", "rewards.x=1"])
def test_malformed_override_is_refused_as_it_was_written(override: str) -> None:
    error = refusal(override)
    assert (error.key, error.value) == ("override", override)


def test_override_makes_a_section_that_the_file_leaves_out() -> None:
    assert parse("queue.capacity=32").queue.capacity == 32


def test_override_takes_yaml_values() -> None:
    config = parse("rollout.stop=['a', b]", "asynchrony.staleness_threshold=null", "data.shuffle=false")
    assert config.rollout.stop == ["a", "b"]
    assert (config.asynchrony.staleness_threshold, config.data.shuffle) == (None, False)


def test_override_reaches_into_a_list() -> None:
    tree = {"rewards": [{"weight": 1}, {"weight": 2}]}
    apply_override(tree, "rewards.1.weight=5")
    assert tree == {"rewards": [{"weight": 1}, {"weight": 5}]}


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "just text"])
def test_text_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config = "):
        parse_config(text)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            "name: a\ntrainer: {steps: 1}\ntrainer:\n  steps: 2\n",
            "Line 3, column 1: the key trainer is given twice",
        ),
        ("data:\n  train: a\n  train: b\n", "Line 3, column 3: the key train is given twice"),
        ("name: a\n  model: b\n", "Line 2, column 8: mapping values"),
        ("", "It holds nothing"),
    ],
)
def test_file_that_says_nothing_clear_is_named_with_the_line(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^config = '{path}'.*{where}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_key_beside_a_merged_mapping_stands_there_once() -> None:
    tree = yaml.safe_dump({key: value for key, value in SMALL.items() if key != "trainer"})
    text = f"{tree}queue: {{capacity: 16}}\ntrainer: {{steps: 3}}\n"
    merged = text.replace("{capacity: 16}", "{<<: {capacity: 99}, capacity: 16}")
    assert parse_config(merged) == parse_config(text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml.*readable YAML file"):
        load_config(tmp_path / "nothing.yaml")


def test_data_files_are_taken_relative_to_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    config = load_config(path, ["data.held_out=hf://d:test"])
    assert config.data.train == str(tmp_path / "a.jsonl")
    assert config.data.held_out == "hf://d:test"


def test_the_users_own_folder_may_be_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    config = load_config(path, ["output=~/runs", "data.held_out=~/held.jsonl"])
    assert (config.output, config.data.held_out) == (tmp_path / "me/runs", str(tmp_path / "me/held.jsonl"))


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


def test_total_rollout_steps_stands_for_the_optimizer_steps_that_they_fill() -> None:
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


def test_engines_that_let_groups_finish_have_the_time_of_a_group_for_it() -> None:
    assert parse().publication == parse().sync
    waiting = parse("asynchrony.partial_rollout=false", "rollout.group_timeout_s=40", "sync.timeout_s=2")
    assert waiting.publication.timeout_s == 42


def test_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().trainer.steps = 9  # type: ignore[misc]


def test_there_are_at_most_eighty_knobs_besides_those_of_kubernetes_and_all_are_documented() -> None:
    knobs = list(fields())
    assert len([key for key, _, _ in knobs if not key.startswith("kubernetes.")]) <= 80
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


def test_names_are_refused_in_words() -> None:
    assert refusal("name=a/b").allowed == PATTERNS[DNS_LABEL]
    assert refusal(f"name={'a' * 64}").allowed == "at most 63 characters"


def test_every_pattern_is_told_in_words() -> None:
    found = re.findall(r'"\^[^"]+\$"', json.dumps(RunConfig.model_json_schema()))
    assert {json.loads(pattern) for pattern in found} == PATTERNS.keys()


def test_a_run_on_kubernetes_needs_what_pods_can_share() -> None:
    assert parse(*ON_KUBERNETES).cluster.provider == "kuberay"
    for index, key in enumerate(("sync.transport", "store.endpoint", "tracking.uri"), start=1):
        left_out = [setting for number, setting in enumerate(ON_KUBERNETES) if number != index]
        assert refusal(*left_out).key == key


@pytest.mark.parametrize(
    "uri", ["sqlite:///runs/mlflow.db", "SQLite:///m.db", "file:///m", "file:m", "mlruns", "/mnt/m"]
)
def test_files_of_a_pod_are_no_tracking_server(uri: str) -> None:
    assert refusal(*ON_KUBERNETES, f"tracking.uri={uri}").key == "tracking.uri"


@pytest.mark.parametrize("uri", ["https://mlflow", "postgresql://user@db/mlflow", "databricks", "databricks://team"])
def test_what_every_pod_reaches_is_a_tracking_server(uri: str) -> None:
    assert parse(*ON_KUBERNETES, f"tracking.uri={uri}").tracking.uri == uri


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("kubernetes.image=tidemill:latest", "kubernetes.image"),
        ("kubernetes.image=host:5000/tidemill", "kubernetes.image"),
        ("kubernetes.namespace=No_Such", "kubernetes.namespace"),
        ("trainer.ranks=9", "trainer.ranks"),
        ("kubernetes.gpu_hours=0", "kubernetes.gpu_hours"),
    ],
)
def test_settings_that_no_cluster_takes_are_refused(override: str, key: str) -> None:
    assert refusal(*ON_KUBERNETES, override).key == key


def test_a_fleet_cannot_shrink_below_its_engines_or_grow_under_kueue() -> None:
    assert refusal(*ON_KUBERNETES, "rollout.engines=3", "kubernetes.max_engines=2").key == "kubernetes.max_engines"
    assert refusal(*ON_KUBERNETES, "kubernetes.queue=team", "kubernetes.max_engines=2").key == "kubernetes.max_engines"


def test_settings_of_a_cluster_that_nobody_asked_for_are_refused() -> None:
    assert refusal("kubernetes.namespace=team").key == "kubernetes"


def test_an_evaluation_mode_that_cannot_work_is_refused() -> None:
    held_out = "data.held_out=held.jsonl"
    assert refusal(held_out, "evaluation.mode=concurrent").key == "evaluation.mode"
    spare = refusal(held_out, "evaluation.mode=spare", "evaluation.every=2")
    assert "rollout.engines = 1" in str(spare)


@pytest.mark.parametrize(
    ("folder", "elsewhere", "meaning"),
    [
        ("/runs/a,b", "store.endpoint=http://store:9000", "the embedded store reads two folders"),
        ("/runs/a?b", "tracking.uri=http://mlflow:5000", "MLflow reads the end of the file name"),
        ("/runs/a%20b", "tracking.uri=http://mlflow:5000", "MLflow reads an escaped character"),
    ],
)
def test_folder_whose_name_its_users_would_misread_is_refused(folder: str, elsewhere: str, meaning: str) -> None:
    error = refusal(f"output={folder}")
    assert (error.key, error.value) == ("output", folder)
    assert meaning in error.allowed
    assert str(parse(f"output={folder}", elsewhere).output) == folder


def test_folder_of_runs_is_read_with_the_folder_that_it_is_relative_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    assert refusal().value == str(tmp_path / "a,b/runs")
