from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from config_rig import ON_KUBERNETES, refusal

from tidemill.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        ([True, None, "x", 1e-06], "[true, null, 'x', 1.0e-06]"),
        ({"a": {"b-c": False}, "two words": ["it's"]}, "{a: {b-c: false}, 'two words': ['it''s']}"),
        (("a", 2), "['a', 2]"),
        (float("-inf"), "-.inf"),
        ("null", "'null'"),
        (r"\d+", r"'\d+'"),
        ("two\nlines", '"two\\nlines"'),
        ("\ud800", '"\\ud800"'),
        (Path("/a"), "'/a'"),
        ({}, "{}"),
    ],
)
def test_a_refused_value_reads_as_it_would_stand_in_the_file(value: object, shown: str) -> None:
    assert str(ConfigError("k", value, "another", "Correct it.")) == f"k = {shown}: allowed is another. Correct it."
    assert yaml.safe_load(shown) == (str(value) if isinstance(value, Path) else json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shuffle=null", "data.shuffle = null: allowed is true or false."),
        ("asynchrony.partial_rollout=maybe", "asynchrony.partial_rollout = 'maybe': allowed is true or false."),
        ("rollout.stop=[true]", "rollout.stop.0 = true: allowed is text, in quotes where YAML"),
        ("rollout.group_timeout_s=10m", "rollout.group_timeout_s = '10m': allowed is a number, in seconds."),
        ("trainer.steps=1.5", "trainer.steps = 1.5: allowed is an integer."),
        ("output=[a]", "output = ['a']: allowed is a path."),
        ("rewards.0.options={1: 2}", "rewards.0.options.1 = 1: allowed is text, in quotes where YAML"),
        (
            "kubernetes.tolerations=[{key: null}]",
            "kubernetes.tolerations.0.key = null: allowed is text, in quotes where YAML",
        ),
    ],
)
def test_a_refusal_speaks_of_yaml_and_not_of_python(override: str, message: str) -> None:
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
def test_what_passes_its_type_and_cannot_work_is_refused(override: str) -> None:
    assert refusal(*ON_KUBERNETES, override).key.startswith(override.partition("=")[0])
