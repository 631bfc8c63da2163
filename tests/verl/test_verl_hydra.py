"""Reading the settings of a verl command as Hydra does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ConfigError
from tidemill.verl.hydra import Unresolved, read_settings

ENVIRONMENT = {"HOME": "/home/me", "N": "3", "CIRCLE": "x${oc.env:CIRCLE}"}


def settings(*overrides: str, config: Path | None = None) -> dict[str, Any]:
    return read_settings(overrides, config, ENVIRONMENT)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("True", True),
        ("null", None),
        ("None", None),
        ("['a','b']", ["a", "b"]),
        ("a b", "a b"),
        ("a #b", "a #b"),
        ("", None),
        ("'5'", "5"),
        ("~/m", "/home/me/m"),
        ("a=b", "a=b"),
        ("{c: 1}", None),
    ],
)
def test_values_are_those_of_hydra(text: str, value: object) -> None:
    assert settings(f"a.b={text}").get("a.b") == value


def test_the_last_override_wins_and_a_tilde_takes_out() -> None:
    assert settings("a.b=1", "+a.c=2", "++a.d=3", "a.b=4", "a.d=5", "~a.c") == {"a.b": 4, "a.d": 5}
    assert settings("a.b.c=1", "a.b.d=2", "~a.b") == {}
    assert settings("a.b={}", "+a.b.c=1", "+a.b={d: 2}") == {"a.b.c": 1, "a.b.d": 2}
    assert settings("a.b.c=1", "a.b=null") == {"a.b": None}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${trainer.project_name}", "verl_examples"),
        ("${a.x}", 7),
        ("${.x}", 7),
        ("${..e}", 9),
        ("x/${a.x}/${trainer.experiment_name}", "x/7/gsm8k"),
        ("${oc.select:a.x,1}", 7),
        ("${oc.select:a.y,1}", 1),
        ("${oc.select:a.y}", None),
        ("${oc.select:a.y,${oc.select:a.z,[1]}}", [1]),
        ("${oc.env:N}", "3"),
        ("${oc.env:M,4}", 4),
        ("${oc.env:HOME}/m", "/home/me/m"),
    ],
)
def test_references_to_single_settings_are_resolved(text: str, value: object) -> None:
    assert settings(f"a.b={text}", "a.x=7", "e=9")["a.b"] == value


@pytest.mark.parametrize(
    "text",
    [
        "${now:%H}",
        "${a.y}",
        "${trainer}",
        "${oc.env:M}",
        "a${oc.env:CIRCLE}",
        "${a.b}",
        "${a.c}",
        "[${a.x}]",
        "${a",
        "${oc.select:data,1}",
    ],
)
def test_what_only_hydra_could_tell_is_unresolved(text: str) -> None:
    assert isinstance(settings(f"a.b={text}", "a.x=7", "a.c=${a.b}")["a.b"], Unresolved)


def test_a_mapping_without_a_space_after_the_colon_is_unresolved() -> None:
    assert isinstance(settings("a.b={c:1}")["a.b.c:1"], Unresolved)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    a = {"_target_": "verl.A", "b": 1, "c": "${.b}", "d": {"e": "1e-6"}, "f": "???"}
    file.write_text(yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], "a": a}), encoding="utf-8")
    assert settings(config=file) == {"a.b": 1, "a.c": 1, "a.d.e": 1e-6}
    assert settings("a.b=2", "~a.d", config=file) == {"a.b": 2, "a.c": 2}


def test_the_list_that_hydra_writes_of_a_run_is_read(tmp_path: Path) -> None:
    file = tmp_path / "overrides.yaml"
    file.write_text(yaml.safe_dump(["a.b=1", "+a.c=x"]), encoding="utf-8")
    assert settings("a.b=2", config=file) == {"a.b": 2, "a.c": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [mine, _self_]\na: 1", "defaults: .*mine"),
        ("defaults: [{x@data: y}]", r"x@data"),
        ("a: [", "a readable YAML file"),
        ("3", "The file holds a int"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        settings(config=tmp_path / "verl.yaml")
    with pytest.raises(ConfigError, match="a readable YAML file"):
        settings(config=tmp_path / "missing.yaml")


@pytest.mark.parametrize("word", ["--flag", "~a.c=3", "stray", "a b=1", "actor@x.y=1", "=1", "a..b=1"])
def test_a_word_that_is_no_override_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings("a.b=1", word)
    assert caught.value.value == word


@pytest.mark.parametrize("name", ["fully_async_ppo_trainer", "fully_async_ppo_trainer.yaml"])
def test_the_configuration_of_the_asynchronous_trainer_may_be_named(name: str) -> None:
    path = "--config-path=/verl/experimental/fully_async_policy/config"
    assert settings(path, f"--config-name={name}", "a.b=1") == {"a.b": 1}


@pytest.mark.parametrize(
    "option", ["--config-name=ppo_megatron_trainer", "--config-name=mine", "--config-path=/my", "--config-path="]
)
def test_another_configuration_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="whose defaults are known"):
        settings("a.b=1", option)


@given(st.text(alphabet="ab1$\"'\\ \n#={}:,()`~+.<>", max_size=60))
def test_any_word_is_read_or_refused(text: str) -> None:
    try:
        found = settings(text, f"a.b={text}")
    except ConfigError:
        return
    assert all(isinstance(key, str) for key in found)
