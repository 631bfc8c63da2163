"""Values that YAML 1.1 reads as something else than a person wrote."""

from __future__ import annotations

from datetime import date

import pytest
import yaml
from config_rig import parse, refusal

from tidemill.config.reading import load_yaml
from tidemill.errors import ConfigError
from tidemill.rollout.sources import load_rows


@pytest.mark.parametrize(
    ("text", "number"), [("010", "8"), ("-0777", "-511"), ("1:30", "90"), ("1:30.5", "90.5"), ("190:20:30", "685230")]
)
def test_number_that_yaml_reads_in_another_base_is_refused(text: str, number: str) -> None:
    error = refusal(f"rollout.group_timeout_s={text}")
    assert (error.key, error.value) == ("rollout.group_timeout_s", text)
    assert error.fix.startswith(f"Line 1, column 1: YAML reads {text} as {number}: write the number without a leading")


def test_number_in_another_base_is_refused_wherever_it_stands() -> None:
    for text in ("a: {b: [1, 010]}", "010: a", "a: !!int '010'"):
        with pytest.raises(yaml.YAMLError, match="YAML reads 010 as 8"):
            load_yaml(text)


@pytest.mark.parametrize("text", ["2024-13-45", "0x_"])
def test_value_that_yaml_cannot_make_is_refused_by_its_setting(text: str) -> None:
    error = refusal(f"name={text}")
    assert (error.key, error.value) == ("name", text)
    assert error.fix.startswith(f"Line 1, column 1: {text} is not a value: ")


def test_values_that_say_what_they_mean_are_taken() -> None:
    assert load_yaml("[0, 10, 1_000, 0x10, -0.5, 1.0e-5, 2024-01-02, on, ~]") == [
        *(0, 10, 1000, 16, -0.5, 1e-5, date(2024, 1, 2), True, None),
    ]


@pytest.mark.parametrize("text", ["010", "08", "1:30", "on", "0x_"])
def test_text_that_looks_like_a_number_survives(text: str) -> None:
    assert parse(f"tracking.experiment='{text}'").tracking.experiment == text
    assert load_yaml(yaml.safe_dump({"a": text})) == {"a": text}


def test_option_of_a_source_in_another_base_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the part after the question mark: Line 1, column 1: YAML reads 010 as 8"):
        load_rows("reasoning_gym://basic_arithmetic?size=3&seed=010", parse().data)
