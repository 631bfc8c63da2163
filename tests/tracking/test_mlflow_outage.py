"""An MLflow server that does not answer, or refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError, StoreError
from tidemill.steps.validate import check_tracking
from tidemill.tracking.mlflow_server import await_server


@contextmanager
def answering(statuses: list[int]) -> Iterator[str]:
    """A server that answers with these statuses in turn, and then with the last one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            body = b"{}" if status == 200 else b"no"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def at(uri: str, config: RunConfig) -> RunConfig:
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})


def test_an_outage_is_waited_for_and_reported_once(addition: RunConfig) -> None:
    told: list[str] = []
    statuses = [503, 502, 503, 200]
    with answering(statuses) as uri:
        await_server(at(uri, addition), told.append, every_s=0.01)
    assert statuses == [200]
    assert len(told) == 1 and f"MLflow at {uri} does not answer" in told[0]


@pytest.mark.parametrize("status", [200, 401, 403, 404])
def test_a_server_that_answers_or_refuses_is_not_waited_for(addition: RunConfig, status: int) -> None:
    told: list[str] = []
    with answering([status]) as uri:
        await_server(at(uri, addition), told.append, every_s=0.01)
    assert told == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_does_not_know_the_account_is_refused_before_anything_starts(status: int) -> None:
    with (
        answering([status]) as uri,
        pytest.raises(ConfigError, match=r"accepts our credentials.*MLFLOW_TRACKING_PASSWORD; pods"),
    ):
        check_tracking(uri)


@pytest.mark.parametrize("status", [200, 429, 500, 503])
def test_a_server_that_is_busy_or_back_soon_is_not_refused(status: int) -> None:
    with answering([status]) as uri:
        check_tracking(uri)


def test_the_wait_has_an_end(addition: RunConfig) -> None:
    with pytest.raises(StoreError, match=r"MLflow at http://127\.0\.0\.1:1 does not answer within 0 s"):
        await_server(at("http://127.0.0.1:1", addition), [].append, limit_s=0.0)


def test_a_file_is_always_available(addition: RunConfig) -> None:
    await_server(addition, [].append)
    assert not addition.output.exists()
