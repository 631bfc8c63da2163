from __future__ import annotations

import pytest
from tidemill_pipelines.catalogue import pairs, typed


def test_numbers_stay_numbers_and_wrong_parameters_are_named() -> None:
    given = typed("post_training", pairs(["config=a: 1", "engines=4", "gpu_hours=1.5", "gpu_type=7"]))
    assert given == {"config": "a: 1", "engines": 4, "gpu_hours": 1.5, "gpu_type": "7"}
    assert type(given["engines"]) is int
    with pytest.raises(ValueError, match="post_training has no parameter engine; it has config, overrides"):
        typed("post_training", {"config": "", "engine": "4"})
    with pytest.raises(ValueError, match="engines = 'four' is not of the type Integer"):
        typed("post_training", {"config": "", "engines": "four"})
    with pytest.raises(ValueError, match="sweep needs the parameter variants"):
        typed("sweep", {"config": ""})
