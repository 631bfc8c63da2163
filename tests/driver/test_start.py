"""What a run does when the cluster has no place for its actors, or they do not end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from config_rig import parse

import tidemill.driver.run
from tidemill.actors import placement
from tidemill.actors.placement import check_gpus, check_hosts
from tidemill.config.run import RunConfig
from tidemill.driver.run import attempt, loaded
from tidemill.errors import ConfigError, RunError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Resources that the cluster is said to have."""
    resources: dict[str, float] = {"CPU": 8.0}
    for module in (tidemill.driver.run, placement):
        monkeypatch.setattr(module, "cluster_resources", lambda: resources)
    return resources


def with_(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.mark.parametrize(("gpus", "fits"), [(0, True), (1, False), (4, False), (5, True)])
def test_gpus_must_suffice_for_all_engines_and_ranks(
    addition: RunConfig, cluster: dict[str, float], gpus: int, fits: bool
) -> None:
    config = with_(addition, "rollout", engines=2, tensor_parallel_size=2)
    cluster["GPU"] = gpus
    if fits:
        check_gpus(config)
    else:
        with pytest.raises(ConfigError, match=rf"rollout\.engines = 2\. .*{gpus} GPUs suffice.*5 in all.*never share"):
            check_gpus(config)


async def test_parts_that_never_load_end_at_the_deadline(addition: RunConfig, cluster: dict[str, float]) -> None:
    config = with_(addition, "rollout", start_timeout_s=0.05)
    with pytest.raises(RunError, match=r"not ready within 0\.05 s .*'CPU': 8\.0"):
        await loaded(config, [asyncio.sleep(60)], place_timeout_s=0.0)


async def test_failure_of_the_cleaning_up_is_logged_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise RunError("the rollouter died")

    with caplog.at_level(logging.WARNING):
        await attempt("stopping the generation", broken())
    assert "stopping the generation failed: RunError('the rollouter died')" in caplog.text


def test_settings_for_one_host_are_refused_on_an_existing_cluster_of_several() -> None:
    s3 = ["sync.transport=object_store", "store.endpoint=http://store:9000"]
    for settings, key in (([], "sync.transport"), (s3[:1], "store.endpoint"), (s3, None)):
        config = parse("cluster.provider=existing", *settings)
        check_hosts(config, {"a"})
        if key is None:
            check_hosts(config, {"a", "b"})
            continue
        with pytest.raises(ConfigError, match=rf"^{key} = .* on a Ray cluster of 2 hosts.*: a, b\."):
            check_hosts(config, {"a", "b"})
    check_hosts(parse(), {"a", "b"})
