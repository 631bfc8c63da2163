"""Every component, called as KFP calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tidemill_components.evaluate import evaluate
from tidemill_components.finish_variant import finish_variant
from tidemill_components.prepare_continual import prepare_continual
from tidemill_components.provision import provision
from tidemill_components.record_progress import record_progress
from tidemill_components.register import register
from tidemill_components.select_best import select_best
from tidemill_components.teardown import teardown
from tidemill_components.train import train
from tidemill_components.validate import validate
from tidemill_components.validate_sweep import validate_sweep

from tidemill.errors import (
    ConfigError,
)
from tidemill.observe.report import Summary
from tidemill.steps.request import DEFAULTS

BAD = "name: probe"
EXAMPLE = Path(__file__).parents[2] / "examples/addition.yaml"
OVERLONG = ("rewards.0.function=overlong", "registry.min_score=null")
EMPTY_FORM = ("",) * (3 + len(DEFAULTS))
CHAT = [{"role": "user", "content": "1 + 1"}]
SUMMARY = Summary(1, 0.5, None, 1.0, 1.0, 1.0, None, None, None, None, None, None, None, None).to_json()


class Artifact:
    """What KFP hands to a component as an output."""

    def __init__(self, path: str = "/dev/null") -> None:
        self.path, self.metadata = path, {}

    def log_metric(self, name: str, value: float) -> None:
        raise AssertionError("nothing to log")


@pytest.mark.parametrize(
    "call",
    [
        lambda: validate.python_func(BAD, *EMPTY_FORM, Artifact()),
        lambda: provision.python_func(BAD),
        lambda: train.python_func(BAD, "{}", Artifact()),
        lambda: evaluate.python_func(BAD, "{}", Artifact()),
        lambda: register.python_func(BAD, "{}", "null", Artifact(), Artifact(), Artifact()),
        lambda: validate_sweep.python_func(BAD, *EMPTY_FORM, "seed=1", Artifact()),
        lambda: finish_variant.python_func(BAD, "{}", "null", Artifact()),
        lambda: select_best.python_func(BAD, "", "", "", ["{}"], Artifact(), Artifact(), Artifact()),
        lambda: prepare_continual.python_func(BAD, *EMPTY_FORM[1:], "s3://tidemill/prompts/", Artifact()),
        lambda: record_progress.python_func(BAD, SUMMARY),
    ],
)
def test_component_refuses_a_bad_config_with_one_message(call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"model = null. Allowed: a value"):
        call()


def test_teardown_of_a_config_that_was_refused_has_nothing_to_do() -> None:
    assert teardown.python_func(BAD, "", "", "", "") is None
