from __future__ import annotations

import pytest
from tidemill_pipelines.local import command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: python -m tidemill_pipelines.local"),
        (["sweeps", "runs"], "PIPELINE is one of post_training, sweep, continual"),
        (["sweep", "runs", "configs=a.yaml"], "sweep has no parameter configs; it has config"),
        (["sweep", "runs", "a.yaml"], "'a.yaml' is not of the form NAME=VALUE"),
    ],
)
def test_misuse_of_the_local_runner_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
