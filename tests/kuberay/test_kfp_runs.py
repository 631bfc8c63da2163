"""Whether KFP says that a run is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import Server

from tidemill.errors import ClusterError, RunError
from tidemill.kuberay.kfp_runs import TOKEN_PATH, KfpRuns


@pytest.mark.parametrize(
    ("state", "over"),
    [
        ("RUNNING", False),
        ("PENDING", False),
        ("PAUSED", False),
        ("SUCCEEDED", True),
        ("FAILED", True),
        ("CANCELED", True),
    ],
)
def test_a_run_is_over_once_kfp_says_so(server: Server, state: str, over: bool) -> None:
    server.answers = [(200, {"state": state})]
    assert KfpRuns(f"{server.url}/").is_over("r-1") is over
    assert server.asked[0][:2] == ("GET", "/apis/v2beta1/runs/r-1")


def test_a_deleted_run_is_over(server: Server) -> None:
    server.answers = [(404, {"error": "not found"})]
    assert KfpRuns(server.url).is_over("r-1")


def test_a_refusal_and_silence_are_not_taken_for_an_end(server: Server) -> None:
    server.answers = [(401, "who are you")]
    with pytest.raises(ClusterError, match="does not tell of run r-1: 401"):
        KfpRuns(server.url).is_over("r-1")
    with pytest.raises(RunError, match=r"no KFP answers at http://127\.0\.0\.1:1"):
        KfpRuns("http://127.0.0.1:1").is_over("r-1")


def test_the_token_of_the_pod_is_shown(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("t-1\n")
    monkeypatch.setenv(TOKEN_PATH, str(tmp_path / "token"))
    server.answers = [(200, {"state": "RUNNING"})]
    KfpRuns(server.url).is_over("r-1")
    assert server.authorizations == ["Bearer t-1"]
