"""The smallest run file, parsed or refused with further settings."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tidemill.config.reading import parse_config
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError

ON_KUBERNETES = (
    "cluster.provider=kuberay",
    "sync.transport=object_store",
    "store.endpoint=http://minio:9000",
    "tracking.uri=http://mlflow:5000",
)
SMALL: dict[str, Any] = {
    "name": "probe",
    "model": "m",
    "data": {"train": "a.jsonl"},
    "rewards": [{"function": "exact_number"}],
    "trainer": {"steps": 4},
}


def parse(*overrides: str) -> RunConfig:
    return parse_config(yaml.safe_dump(SMALL), overrides)


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides)
    return caught.value
