"""The stand-in of a cluster keeps the contract; the client tells what goes wrong on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import urllib3
from api_server import Server
from cluster_contract import NOTHING, ClusterContract

from tidemill.errors import ClusterError, ConfigError, RunError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import PODS, RAY_JOBS, WORKFLOWS, Cluster, name_of
from tidemill.kuberay.fake import FakeClock, FakeCluster


class TestFakeCluster(ClusterContract):
    @pytest.fixture
    def cluster(self) -> Cluster:
        return FakeCluster(FakeClock(), missing=[WORKFLOWS, NOTHING])


def kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesCluster:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.server_port)))
    return KubernetesCluster.connect("team")


def refusal(code: int, message: str, **details: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "code": code, "message": message, "details": details}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(401, "Unauthorized"), "does not know us: Unauthorized"),
        (refusal(403, 'User "u" cannot list pods'), 'no permission to list pods in namespace team: User "u" cannot'),
        (refusal(403, "exceeded quota: jobs"), "namespace team has no room: exceeded quota: jobs"),
        ((404, "404 page not found"), "the cluster knows no pods: install Kubernetes"),
        (refusal(422, "spec.x: Invalid value"), r"spec.x: Invalid value \(422\)"),
    ],
)
def test_a_refusal_is_told_and_not_repeated(server: Server, cluster: Cluster, answer: Any, told: str) -> None:
    server.answers = [answer]
    with pytest.raises(ClusterError, match=told):
        cluster.list(PODS)
    assert len(server.asked) == 1


def test_kuberay_that_is_not_installed_is_named(server: Server, cluster: Cluster) -> None:
    server.answers = [(404, "404 page not found")]
    for ask in (lambda: cluster.create(RAY_JOBS, {"metadata": {"name": "a"}}), lambda: cluster.get(RAY_JOBS, "a")):
        with pytest.raises(ClusterError, match=r"knows no rayjobs\.ray\.io: install the KubeRay operator"):
            ask()


def test_a_busy_server_is_asked_again(server: Server, cluster: Cluster) -> None:
    server.answers = [(503, "busy"), (429, "busy"), (200, {"items": [], "metadata": {}})]
    assert list(cluster.list(PODS)) == []
    assert len(server.asked) == 3


def test_pages_of_a_long_list_are_put_together(server: Server, cluster: Cluster) -> None:
    pages = [("a", "more"), ("b", "")]
    server.answers = [(200, {"items": [{"metadata": {"name": n}}], "metadata": {"continue": c}}) for n, c in pages]
    assert [name_of(pod) for pod in cluster.list(PODS, "x=y")] == ["a", "b"]
    assert "continue=more" in server.asked[1][1]
    assert all("labelSelector=x%3Dy" in path for _, path, _ in server.asked)


def test_the_namespace_and_the_foreground_are_asked_for(server: Server, cluster: Cluster) -> None:
    server.answers = [(200, {})]
    cluster.delete(RAY_JOBS, "a")
    path = "/apis/ray.io/v1/namespaces/team/rayjobs/a?"
    assert server.asked == [("DELETE", path, {"propagationPolicy": "Foreground"})]


def test_a_log_that_is_json_comes_as_it_is(server: Server, cluster: Cluster) -> None:
    server.answers = [(200, '{"step": 1}\n')]
    assert cluster.log("pod") == '{"step": 1}\n'
    assert list(cluster.follow("pod")) == ['{"step": 1}']


def test_a_server_that_is_not_there_is_named_and_may_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, 1)))
    with pytest.raises(RunError, match=r"API server at http://127\.0\.0\.1:1 does not answer"):
        KubernetesCluster.connect("team", urllib3.Retry(0)).list(PODS)


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        KubernetesCluster.connect("team")
