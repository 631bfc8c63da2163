"""Further tries of a step in its pod."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cluster import FakeClock

from tidemill.errors import ClusterError, ConfigError, RunError, StoreError, StoreRefusedError
from tidemill.kuberay.run_status import KFP_RUN
from tidemill.steps.retries import retried


class Step:
    """Fails with the given errors, one for each try, and then returns how often it was tried."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.tries = list(errors), 0

    def __call__(self) -> int:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.tries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    """The time in a pod of KFP."""
    monkeypatch.setenv(KFP_RUN, "kfp-1")
    return FakeClock()


def test_an_error_that_may_pass_is_tried_again(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    step, begun = Step(StoreError("away"), RunError("busy"), OSError("reset")), clock.now
    assert retried(step, now=clock.time, sleep=clock.sleep)() == 4
    assert clock.now - begun == 5 + 20 + 80
    assert capsys.readouterr().err.splitlines()[0] == "try 1 failed, next in 5 s: away"


def test_the_last_error_is_raised(clock: FakeClock) -> None:
    step = Step(*(StoreError(f"away {number}") for number in range(9)))
    with pytest.raises(StoreError, match="away 3"):
        retried(step, now=clock.time, sleep=clock.sleep)()


@pytest.mark.parametrize(
    "error", [ConfigError("a", 1, "2", "Set it."), ClusterError("no permission"), StoreRefusedError("wrong keys")]
)
def test_an_error_that_would_come_again_is_final(clock: FakeClock, error: Exception) -> None:
    step = Step(error)
    with pytest.raises(type(error)):
        retried(step, now=clock.time, sleep=clock.sleep)()
    assert step.tries == 1


def test_no_try_starts_after_the_limit(clock: FakeClock) -> None:
    def slow() -> None:
        clock.sleep(1000)
        raise RunError("MLflow is away")

    begun = clock.now
    with pytest.raises(RunError):
        retried(slow, now=clock.time, sleep=clock.sleep)()
    assert clock.now - begun == 1000 + 5 + 1000


def test_outside_of_a_cluster_kfp_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KFP_RUN, raising=False)
    step = Step(RunError("away"))
    with pytest.raises(RunError):
        retried(step)()
    assert step.tries == 1
