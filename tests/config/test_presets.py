from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from config_rig import parse

from tidemill.config.algorithm import AlgorithmConfig, Preset
from tidemill.config.presets import PRESETS
from tidemill.config.reading import parse_config
from tidemill.errors import ConfigError


def test_every_preset_has_a_name_in_the_settings() -> None:
    assert set(get_args(Preset)) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_its_settings_and_nothing_else(name: str) -> None:
    found = AlgorithmConfig.model_validate({"preset": name}).model_dump()
    expected = AlgorithmConfig().model_dump() | {"preset": name}
    for key, value in PRESETS[name].items():
        expected[key] = {**expected[key], **value} if isinstance(value, dict) else value
    assert found == expected


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_with_a_preset_is_accepted_and_read_back(name: str) -> None:
    config = parse(f"algorithm.preset={name}")
    assert parse_config(yaml.safe_dump(config.model_dump(mode="json"))) == config


def test_a_setting_of_the_run_file_takes_precedence() -> None:
    algorithm = parse("algorithm.preset=dapo", "algorithm.clip_ratio_high=0.5").algorithm
    assert (algorithm.clip_ratio_high, algorithm.aggregation) == (0.5, "token")
    correction = parse("algorithm.preset=areal", "algorithm.rollout_correction.veto_threshold=0.001").algorithm
    assert correction.rollout_correction.rollout_is_threshold == 5
    assert correction.rollout_correction.veto_threshold == 0.001


def test_the_page_of_algorithms_lists_every_preset_with_its_settings() -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8").partition("## Advantages")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {', '.join(shown(PRESETS[name]))} |" for name in PRESETS]


def shown(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from shown(value, f"{key}.")
        else:
            yield f"`{prefix}{key}: {str(value).lower() if isinstance(value, bool) else value}`"


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.preset = 'ppoo'\. Allowed: .*'dr_grpo'"):
        parse("algorithm.preset=ppoo")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.preset=gspo", "algorithm.tau_pos=2"], "tau_pos"),
        (["algorithm.adv_estimator=rloo", "algorithm.normalize_std=false"], "normalize_std"),
        (["algorithm.gamma=0.9"], "gamma"),
        (["algorithm.pass_k=2"], "pass_k"),
        (["algorithm.kl_loss_type=k2"], "kl_loss_type"),
        (["algorithm.loss_mode=sapo", "algorithm.clip_ratio_high=0.3"], "clip_ratio_high"),
        (["algorithm.loss_mode=cispo", "algorithm.dual_clip=null"], "dual_clip"),
        (["algorithm.rollout_correction.rollout_is=token"], "rollout_correction.rollout_is"),
        (["algorithm.rollout_correction.rollout_rs_threshold=3"], "rollout_correction.rollout_rs_threshold"),
        (
            ["algorithm.rollout_correction.rollout_rs=token", "algorithm.rollout_correction.rollout_rs_threshold=0.1"],
            "rollout_correction.rollout_rs_threshold_lower",
        ),
    ],
)
def test_a_setting_without_effect_beside_the_others_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides)
    assert caught.value.key == f"algorithm.{key}"


def test_a_group_of_one_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.group_size = 1"):
        parse("rollout.group_size=1")
    assert parse("rollout.group_size=1", "algorithm.adv_estimator=reinforce_plus_plus").rollout.group_size == 1
    with pytest.raises(ConfigError, match=r"^algorithm\.pass_k = 9"):
        parse("algorithm.adv_estimator=pass_at_k", "algorithm.pass_k=9", "rollout.group_size=8")
