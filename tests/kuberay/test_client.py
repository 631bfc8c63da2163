"""The fake cluster keeps the contract; the client reports errors of the API server and of the connection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
from api_server import Server
from cluster_contract import NOTHING, ClusterContract
from fake_cluster import FakeClock, FakeCluster

from tidemill.errors import ClusterError, ConfigError, RunError
from tidemill.kuberay.client import KubernetesCluster
from tidemill.kuberay.cluster import PODS, RAY_JOBS, WORKFLOWS, Cluster, name_of


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
        (refusal(401, "Unauthorized"), "does not accept the credentials: Unauthorized"),
        (refusal(403, 'User "u" cannot list pods'), 'no permission to list pods in namespace team: User "u" cannot'),
        (refusal(403, "exceeded quota: jobs"), "namespace team has no room: exceeded quota: jobs"),
        ((404, "404 page not found"), "the cluster knows no pods: install Kubernetes"),
        (refusal(422, "spec.x: Invalid value"), r"spec.x: Invalid value \(422\)"),
    ],
)
def test_a_refusal_is_an_error_and_not_retried(server: Server, cluster: Cluster, answer: Any, told: str) -> None:
    server.answers = [answer]
    with pytest.raises(ClusterError, match=told):
        cluster.list(PODS)
    assert len(server.asked) == 1


def test_missing_kuberay_is_named(server: Server, cluster: Cluster) -> None:
    server.answers = [(404, "404 page not found")]
    for ask in (lambda: cluster.create(RAY_JOBS, {"metadata": {"name": "a"}}), lambda: cluster.get(RAY_JOBS, "a")):
        with pytest.raises(ClusterError, match=r"knows no rayjobs\.ray\.io: install the KubeRay operator"):
            ask()


def test_a_busy_server_is_retried(server: Server, cluster: Cluster) -> None:
    server.answers = [(503, "busy"), (429, "busy"), (200, {"items": [], "metadata": {}})]
    assert list(cluster.list(PODS)) == []
    assert len(server.asked) == 3


def test_pages_of_a_list_are_joined(server: Server, cluster: Cluster) -> None:
    pages = [("a", "more"), ("b", "")]
    server.answers = [(200, {"items": [{"metadata": {"name": n}}], "metadata": {"continue": c}}) for n, c in pages]
    assert [name_of(pod) for pod in cluster.list(PODS, "x=y")] == ["a", "b"]
    assert "continue=more" in server.asked[1][1]
    assert all("labelSelector=x%3Dy" in path for _, path, _ in server.asked)


def test_deletion_is_in_the_namespace_and_in_the_foreground(server: Server, cluster: Cluster) -> None:
    server.answers = [(200, {})]
    cluster.delete(RAY_JOBS, "a")
    path = "/apis/ray.io/v1/namespaces/team/rayjobs/a?"
    assert server.asked == [("DELETE", path, {"propagationPolicy": "Foreground"})]


def test_a_log_that_is_json_is_not_parsed(server: Server, cluster: Cluster) -> None:
    server.answers = [(200, '{"step": 1}\n')]
    assert cluster.log("pod") == '{"step": 1}\n'
    assert list(cluster.follow("pod")) == ['{"step": 1}']


def test_an_unreachable_server_is_a_transient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, 1)))
    with pytest.raises(RunError, match=r"API server at http://127\.0\.0\.1:1 does not answer"):
        KubernetesCluster.connect("team", urllib3.Retry(0)).list(PODS)


def test_a_missing_kubeconfig_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        KubernetesCluster.connect("team")


def test_a_namespace_that_is_being_deleted_is_not_reported_as_a_missing_permission(
    server: Server, cluster: Cluster
) -> None:
    said = (
        'rayjobs.ray.io "a" is forbidden: unable to create new content in namespace team because it is being terminated'
    )
    server.answers = [refusal(403, said)]
    with pytest.raises(ClusterError, match="namespace team is being deleted"):
        cluster.create(RAY_JOBS, {"metadata": {"name": "a"}})


def test_a_list_whose_continue_token_expired_is_restarted(server: Server, cluster: Cluster) -> None:
    page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}}
    last = {"items": [{"metadata": {"name": "b"}}], "metadata": {}}
    server.answers = [(200, page), refusal(410, "The provided continue parameter is too old"), (200, page), (200, last)]
    assert [name_of(pod) for pod in cluster.list(PODS)] == ["a", "b"]
    assert "continue" not in server.asked[2][1]


@pytest.mark.parametrize("code", [408, 409, 410])
def test_transient_statuses_are_transient_errors(server: Server, cluster: Cluster, code: int) -> None:
    server.answers = [refusal(code, "not now")]
    with pytest.raises(RunError, match=f"answers {code}: not now"):
        cluster.patch(RAY_JOBS, "a", {})


def test_an_object_that_is_deleted_before_it_is_read_is_created(server: Server, cluster: Cluster) -> None:
    taken = (409, {"kind": "Status", "code": 409, "reason": "AlreadyExists", "message": "it exists"})
    server.answers = [taken, refusal(404, "not found", name="a"), (201, {"metadata": {"name": "a", "uid": "2"}})]
    assert cluster.create(RAY_JOBS, {"metadata": {"name": "a"}})["metadata"]["uid"] == "2"


def test_a_log_that_breaks_off_is_an_error(server: Server, cluster: Cluster) -> None:
    server.answers = [(200, "one\n")]
    server.cut = True
    with pytest.raises(RunError, match="the log of pod a broke off"):
        list(cluster.follow("a"))


@pytest.mark.parametrize("code", [400, 422])
def test_an_invalid_object_is_refused_with_the_message_of_the_server(
    server: Server, cluster: KubernetesCluster, code: int
) -> None:
    said = 'strict decoding error: unknown field "spec.x"'
    server.answers = [(code, {"kind": "Status", "code": code, "reason": "BadRequest", "message": said})]
    for create in (cluster.create, cluster.dry_run_create):
        with pytest.raises(ClusterError, match=r'refuses rayjobs\.ray\.io a: .*unknown field "spec\.x"\. Correct'):
            create(RAY_JOBS, {"metadata": {"name": "a"}})
    queries = [parse_qs(urlsplit(path).query) for _, path, _ in server.asked]
    assert queries == [{"fieldValidation": ["Strict"]}, {"fieldValidation": ["Strict"], "dryRun": ["All"]}]


def test_a_dry_run_of_an_object_that_exists_passes(server: Server, cluster: KubernetesCluster) -> None:
    server.answers = [(409, {"kind": "Status", "code": 409, "reason": "AlreadyExists", "message": "it exists"})]
    cluster.dry_run_create(RAY_JOBS, {"metadata": {"name": "a"}})
