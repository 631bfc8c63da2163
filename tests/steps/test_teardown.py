"""The exit handler: everything is released, even if settings changed or one release fails."""

from __future__ import annotations

import pytest
from fake_cluster import FakeClock

from tidemill.config.run import RunConfig
from tidemill.errors import ClusterError, RunError, TidemillError
from tidemill.kuberay.run_status import KFP_RUN as KFP_ENV
from tidemill.steps.request import Request
from tidemill.steps.retries import retried
from tidemill.steps.teardown import teardown

KFP_RUN = "1a2b3c4d-0000-4000-8000-000000000000"
ON_CLUSTER = (
    "cluster.provider=kuberay\nsync.transport=object_store\nkubernetes.namespace=elsewhere\n"
    "store.endpoint=http://minio:9000\ntracking.uri=http://mlflow:5000\n"
)


class Cluster:
    """Records what is released, and fails for some."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.stuck: set[str] = set()
        self.error: type[TidemillError] = ClusterError

    def teardown(self, request: Request, variants: str = "") -> None:
        teardown(request, variants, release_pipeline=self.release_pipeline, release=self.release_run)

    def release_run(self, config: RunConfig) -> None:
        self.release(config.name)

    def release_pipeline(self, kfp_run: str, namespaces: set[str]) -> None:
        self.release(f"{kfp_run} in {' '.join(sorted(namespaces))}")

    def release(self, what: str) -> None:
        self.done.append(what)
        if what.partition(" ")[0] in self.stuck:
            raise self.error(f"{what} is still there")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_objects_of_the_kfp_run_are_released_before_the_run(cluster: Cluster, addition: RunConfig) -> None:
    cluster.teardown(Request(addition.to_yaml(), ON_CLUSTER, kfp_run=KFP_RUN))
    assert cluster.done == [f"{KFP_RUN} in elsewhere tidemill", "addition-1a2b3c4d"]


@pytest.mark.parametrize("config", ["name: probe", "a: [", "s3://bucket/run.yaml"])
def test_unreadable_settings_do_not_prevent_the_release(cluster: Cluster, config: str) -> None:
    cluster.teardown(Request(config, kfp_run=KFP_RUN))
    assert cluster.done == [f"{KFP_RUN} in tidemill"]


def test_failed_release_of_a_variant_does_not_stop_the_others(cluster: Cluster, addition: RunConfig) -> None:
    cluster.stuck = {KFP_RUN, "s-v1", "s-v3"}
    asked = Request(addition.to_yaml(), run_name="s", kfp_run=KFP_RUN)
    with pytest.raises(ClusterError, match=rf"^{KFP_RUN} .* still there; s-v1 is still there; s-v3 is still there$"):
        cluster.teardown(asked, "seed=1\nseed=2\nseed=3")
    assert cluster.done[1:] == ["s-v1", "s-v2", "s-v3"]


def test_only_a_failure_that_may_pass_is_tried_again_until_everything_is_released(
    cluster: Cluster, addition: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KFP_ENV, KFP_RUN)
    clock = FakeClock()
    tried = retried(cluster.teardown, tries=None, now=clock.time, sleep=clock.sleep)
    asked = Request(addition.to_yaml(), kfp_run=KFP_RUN)
    cluster.stuck = {KFP_RUN}
    with pytest.raises(ClusterError):
        tried(asked)
    assert len(cluster.done) == 2
    cluster.error = RunError
    clock.after(600, cluster.stuck.clear)
    tried(asked)
    assert cluster.done[2:] == 6 * cluster.done[:2]
    cluster.stuck, begun = {KFP_RUN}, clock.now
    with pytest.raises(RunError, match="still there"):
        tried(asked)
    assert 1800 <= clock.now - begun < 2400  # of the hour that the pod has


def test_teardown_may_be_repeated(cluster: Cluster, addition: RunConfig) -> None:
    for _ in range(2):
        cluster.teardown(Request(addition.to_yaml(), kfp_run=KFP_RUN))
    assert cluster.done[:2] == cluster.done[2:]
