"""A run file is read, and each setting that is wrong is refused in words."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
import yaml
from config_rig import ON_KUBERNETES, SMALL, parse, refusal
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.reading import apply_override, load_config, load_value, load_yaml, parse_config
from tidemill.config.run import RunConfig, fields
from tidemill.config.section import DNS_LABEL, PATTERNS
from tidemill.errors import ConfigError
from tidemill.rollout.sources import load_rows


def test_required_keys_are_enough() -> None:
    assert parse().trainer.steps == 4


@pytest.mark.parametrize("key", ["name", "model", "data", "rewards", "trainer"])
def test_missing_key_is_named(key: str) -> None:
    tree = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(ConfigError, match=f"^{key} = null. Allowed: a value"):
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
def test_the_intended_setting_is_suggested(override: str, meant: str | None) -> None:
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
        ("rollout.group_size=0", "greater than or equal to 1"),
        ("rollout.temperature=0", "greater than 0"),
        ("asynchrony.max_staleness=-1", "greater than or equal to 0"),
        ("asynchrony.staleness_threshold=-0.1", "greater than or equal to 0"),
        ("queue.capacity=0", "greater than or equal to 1"),
        ("asynchrony.pause_mode=stop", "'keep', 'abort' or 'wait'"),
        ("algorithm.old_log_prob=newest", "'rollout', 'version_start' or 'decoupled'"),
        ("algorithm.rollout_correction.veto_threshold=1", "less than 1"),
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


def test_no_number_may_be_nan() -> None:
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


def test_the_number_of_other_mistakes_is_shown() -> None:
    assert "(1 more setting is wrong.)" in str(refusal("trainer.steps=0", "rollout.group_size=0"))


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
def test_a_text_that_is_not_a_mapping_is_refused(text: str) -> None:
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
def test_an_ambiguous_file_is_named_with_the_line(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^config = '{path}'.*{where}") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_key_may_replace_that_of_a_merged_mapping() -> None:
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


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    config = load_config(path, ["output=~/runs", "data.held_out=~/held.jsonl"])
    assert (config.output, config.data.held_out) == (tmp_path / "me/runs", str(tmp_path / "me/held.jsonl"))


def test_names_are_refused_in_words() -> None:
    assert refusal("name=a/b").allowed == PATTERNS[DNS_LABEL]
    assert refusal(f"name={'a' * 64}").allowed == "at most 63 characters"


def test_every_pattern_has_words() -> None:
    found = re.findall(r'"\^[^"]+\$"', json.dumps(RunConfig.model_json_schema()))
    assert {json.loads(pattern) for pattern in found} == PATTERNS.keys()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shuffle=null", "data.shuffle = null. Allowed: true or false."),
        ("asynchrony.partial_rollout=maybe", "asynchrony.partial_rollout = 'maybe'. Allowed: true or false."),
        ("rollout.stop=[true]", "rollout.stop.0 = true. Allowed: text, in quotes where YAML"),
        ("rollout.group_timeout_s=10m", "rollout.group_timeout_s = '10m'. Allowed: a number, in seconds."),
        ("trainer.steps=1.5", "trainer.steps = 1.5. Allowed: an integer."),
        ("output=[a]", "output = ['a']. Allowed: a path."),
        ("rewards.0.options={1: 2}", "rewards.0.options.1 = 1. Allowed: text, in quotes where YAML"),
        (
            "kubernetes.tolerations=[{key: null}]",
            "kubernetes.tolerations.0.key = null. Allowed: text, in quotes where YAML",
        ),
    ],
)
def test_a_refusal_uses_the_words_of_yaml(override: str, message: str) -> None:
    assert str(refusal(override)).startswith(message)


@pytest.mark.parametrize(
    "override",
    [
        "seed=4294967296",
        "rollout.group_timeout_s=1e12",
        "asynchrony.staleness_threshold=1e308",
        "kubernetes.max_hours=1e6",
        "kubernetes.keep_s=99999999999",
        "kubernetes.service_account=My Account",
        "kubernetes.secrets=[HF_TOKEN]",
        "kubernetes.env={MY VARIABLE: a}",
        "kubernetes.queue=''",
        "kubernetes.gpu_resource=gpu",
        "kubernetes.gpu_type=NVIDIA H100 80GB HBM3",
        "kubernetes.head.cpus=1e9",
        "kubernetes.head.memory_gib=1",
        "kubernetes.trainer.shared_memory_gib=65",
        "tracking.experiment=''",
        "data.train=''",
        "data.prompt_key=''",
    ],
)
def test_a_value_of_the_right_type_that_cannot_work_is_refused(override: str) -> None:
    assert refusal(*ON_KUBERNETES, override).key.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    ("text", "number"), [("010", "8"), ("-0777", "-511"), ("1:30", "90"), ("1:30.5", "90.5"), ("190:20:30", "685230")]
)
def test_a_number_that_yaml_reads_in_another_base_is_refused(text: str, number: str) -> None:
    error = refusal(f"rollout.group_timeout_s={text}")
    assert (error.key, error.value) == ("rollout.group_timeout_s", text)
    assert error.fix.startswith(f"Line 1, column 1: YAML reads {text} as {number}: write the number without a leading")


def test_a_number_in_another_base_is_refused_anywhere() -> None:
    for text in ("a: {b: [1, 010]}", "010: a", "a: !!int '010'"):
        with pytest.raises(yaml.YAMLError, match="YAML reads 010 as 8"):
            load_yaml(text)


@pytest.mark.parametrize("text", ["2024-13-45", "0x_"])
def test_a_value_that_yaml_cannot_construct_is_refused_by_its_setting(text: str) -> None:
    error = refusal(f"name={text}")
    assert (error.key, error.value) == ("name", text)
    assert error.fix.startswith(f"Line 1, column 1: {text} is not a value: ")


def test_unambiguous_values_are_accepted() -> None:
    assert load_yaml("[0, 10, 1_000, 0x10, -0.5, 1.0e-5, 2024-01-02, on, ~]") == [
        *(0, 10, 1000, 16, -0.5, 1e-5, date(2024, 1, 2), True, None),
    ]


@pytest.mark.parametrize("text", ["010", "08", "1:30", "on", "0x_"])
def test_text_that_looks_like_a_number_survives(text: str) -> None:
    assert parse(f"tracking.experiment='{text}'").tracking.experiment == text
    assert load_yaml(yaml.safe_dump({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.system_prompt", "Solve. Put the final answer after ####. Example: #### 7"),
        ("data.system_prompt", "First line.\nSecond line.\n\n# Rules\nBe brief."),
        ("data.system_prompt", "#short"),
        ("output", "/data/run #1/out"),
        ("data.train", "/data/set #2/train.jsonl"),
        ("rollout.stop.0", "a #b"),
        ("rewards.0.options.marker", "x\r\ny"),
    ],
)
def test_plain_text_of_an_override_stays_as_typed(key: str, text: str) -> None:
    tree = yaml.safe_load(yaml.safe_dump(SMALL | {"rollout": {"stop": ["a"]}}))
    apply_override(tree, f"{key}={text}")
    for part in key.split("."):
        tree = tree[int(part) if part.isdecimal() else part]
    assert tree == text


@pytest.mark.parametrize(
    "text",
    [
        *("'quoted' # comment", "[a, b] # comment", "[a, # comment\n b]", "Answer: #1 or 2", "[####]", "{a: b #c}"),
        *(
            "'two\nlines'",
            "[two\nlines]",
            "&name text",
            "! text",
            "!!str 5",
            "--- text",
            "text\n...",
            "%YAML 1.1\n--- a",
        ),
    ],
)
def test_override_of_which_yaml_would_leave_out_a_part_is_refused(text: str) -> None:
    error = refusal(f"data.system_prompt={text}")
    assert (error.key, error.value) == ("data.system_prompt", text)
    assert "between quotes" in error.fix or "between double quotes" in error.fix


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("5", 5),
        ("5 # five", "5 # five"),
        ("['#', \"a\\nb\"]", ["#", "a\nb"]),
        ('{"a": [1,\n2], "b": "c #d"}', {"a": [1, 2], "b": "c #d"}),
        ("|\n two\n lines", "two\nlines"),
        ("a#b", "a#b"),
    ],
)
def test_value_of_an_override_is_yaml(text: str, value: object) -> None:
    assert load_value(text) == value


@given(st.text(alphabet="ab1 #\n'\"[]{},:&!*|>-%.\\", max_size=20))
def test_text_of_an_override_loses_no_letter(text: str) -> None:
    try:
        value = load_value(text)
    except yaml.YAMLError:
        return
    letters = Counter(re.findall("[ab#]", text))
    assert letters <= Counter(str(value)) or "\\" in text, value


def test_option_of_a_source_in_another_base_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the part after the question mark: Line 1, column 1: YAML reads 010 as 8"):
        load_rows("reasoning_gym://basic_arithmetic?size=3&seed=010", parse().data)


def test_a_refusal_of_our_own_is_without_words_of_the_validator() -> None:
    error = refusal("rewards.0.options={response: abc}")
    assert error.allowed == "response must be a text that has {text} or {raw} once, such as <think>{text}"
