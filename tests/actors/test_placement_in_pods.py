"""Where actors go when a run has pods, and how long the run waits for those."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.actors import placement
from tidemill.actors.placement import (
    Placement,
    engine_placement,
    has_own_pods,
    rank_placement,
    service_placement,
    shortage,
    wait_for_pods,
)
from tidemill.config.run import RunConfig
from tidemill.errors import RunError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Resources that the cluster is said to have."""
    resources: dict[str, float] = {}
    monkeypatch.setattr(placement, "cluster_resources", lambda: resources)
    return resources


def on_pods(config: RunConfig, **kubernetes: Any) -> RunConfig:
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"provider": "kuberay"}),
            "kubernetes": config.kubernetes.model_copy(update=kubernetes),
            "rollout": config.rollout.model_copy(update={"engines": 2, "tensor_parallel_size": 4}),
            "trainer": config.trainer.model_copy(update={"ranks": 3}),
        }
    )


def test_actors_ask_for_their_pods_and_gpus(addition: RunConfig) -> None:
    config = on_pods(addition)
    assert engine_placement(config) == Placement(4, {"tidemill_rollout": 1.0})
    assert rank_placement(config) == Placement(1, {"tidemill_trainer": 1.0})
    assert service_placement(config) == Placement(0, {"tidemill_service": 1.0})
    assert rank_placement(config).options({"A": "b"}) == {
        "num_cpus": 0,
        "num_gpus": 1,
        "resources": {"tidemill_trainer": 1.0},
        "runtime_env": {"env_vars": {"A": "b"}},
    }
    assert has_own_pods(config)


def test_pods_without_gpus_are_asked_for_none(addition: RunConfig) -> None:
    config = on_pods(addition, gpu_resource=None)
    assert (engine_placement(config).gpus, rank_placement(config).gpus) == (0, 0)


@pytest.mark.parametrize(("there", "gpus"), [({}, 0), ({"GPU": 2.0}, 1)])
def test_actors_on_this_machine_take_its_gpus_and_no_more(
    addition: RunConfig, cluster: dict[str, float], there: dict[str, float], gpus: int
) -> None:
    cluster |= there
    assert engine_placement(addition) == rank_placement(addition) == Placement(gpus)
    assert service_placement(addition) == Placement()
    assert not has_own_pods(addition)


async def test_pods_are_waited_for_and_what_is_missing_is_told(addition: RunConfig, cluster: dict[str, float]) -> None:
    said: list[str] = []
    coming = iter([{"tidemill_trainer": 3.0, "tidemill_service": 1000.0}, {"tidemill_rollout": 2.0, "GPU": 11.0}])

    def announce(text: str) -> None:
        said.append(text)
        cluster.update(next(coming))

    await wait_for_pods(on_pods(addition), announce, poll_s=0.01)
    assert said == [
        "wait for pods: 0 of 3 tidemill_trainer, 0 of 2 tidemill_rollout, 0 of 1 tidemill_service, 0 of 11 GPU",
        "wait for pods: 0 of 2 tidemill_rollout, 0 of 11 GPU",
    ]


async def test_pods_that_never_come_end_the_run(addition: RunConfig, cluster: dict[str, float]) -> None:
    cluster |= {"tidemill_trainer": 3.0, "tidemill_service": 1.0, "tidemill_rollout": 1.0, "GPU": 7.0}
    with pytest.raises(RunError, match=r"start_timeout_s = 0 s: 1 of 2 tidemill_rollout, 7 of 11 GPU"):
        await wait_for_pods(on_pods(addition, start_timeout_s=0), lambda text: None)


async def test_other_providers_wait_for_nothing(addition: RunConfig, cluster: dict[str, float]) -> None:
    await wait_for_pods(addition, pytest.fail)


def test_nothing_is_short_where_there_is_enough() -> None:
    assert shortage({"GPU": 2.0}, {"GPU": 3.0}) == ""
