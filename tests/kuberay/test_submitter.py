from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tidemill.errors import RunError
from tidemill.kuberay.submitter import (
    LOG_BYTES_PER_S,
    MAX_BYTES,
    OUTAGE_S,
    POLL_S,
    TOO_LONG,
    DriverLog,
    Submission,
    dashboard,
)

Answer = tuple[int, str] | OSError
UNKNOWN = (404, "Job one does not exist")
TAKEN = (200, '{"submission_id": "one"}')
JOB = {"entrypoint": "true", "runtime_env": {"pip": ["sympy"]}}


def state(status: str) -> Answer:
    return 200, json.dumps({"status": status})


class Ray:
    """A dashboard with given answers, and its clock."""

    def __init__(self, *answers: Answer, forever: Answer | None = None) -> None:
        self.answers, self.forever = iter(answers), forever
        self.asked: list[tuple[str, str, Mapping[str, Any] | None]] = []
        self.told: list[str] = []
        self.now = 0.0
        self.log: Answer = 200, '{"logs": ""}'
        self.logs_asked = 0

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        if path == "/api/jobs/one/logs":
            self.logs_asked += 1
            if isinstance(self.log, OSError):
                raise self.log
            return self.log
        self.asked.append((method, path, body))
        answer = next(self.answers, self.forever)
        assert answer is not None, "asked too often"
        if isinstance(answer, OSError):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def submission(self) -> Submission:
        return Submission(JOB, "one", self.ask, self.sleep, lambda: self.now, self.told.append)


def test_a_job_is_submitted_once_and_followed_to_its_end() -> None:
    ray = Ray(UNKNOWN, TAKEN, state("PENDING"), state("RUNNING"), state("RUNNING"), state("SUCCEEDED"))
    assert ray.submission().follow() == "SUCCEEDED"
    assert [(method, path) for method, path, _ in ray.asked] == [
        ("GET", "/api/jobs/one"),
        ("POST", "/api/jobs/"),
        *[("GET", "/api/jobs/one")] * 4,
    ]
    assert ray.asked[1][2] == {**JOB, "submission_id": "one"}
    assert ray.told == ["job one: submitted", "job one: PENDING", "job one: RUNNING", "job one: SUCCEEDED"]


def test_a_second_submitter_follows_the_job_of_the_first() -> None:
    """kuberay#1902: a second submission with the same id is refused, and the run fails."""
    ray = Ray(state("RUNNING"), state("FAILED"))
    assert ray.submission().follow() == "FAILED"
    assert all(method == "GET" for method, _, _ in ray.asked)


def test_a_connection_that_breaks_does_not_end_the_run() -> None:
    away = OSError("connection reset")
    ray = Ray(state("RUNNING"), away, away, (503, "starting"), state("RUNNING"), away, state("SUCCEEDED"))
    assert ray.submission().follow() == "SUCCEEDED"


def test_a_job_is_not_submitted_twice_if_the_answer_is_lost() -> None:
    ray = Ray(UNKNOWN, OSError("timed out"), state("RUNNING"), state("SUCCEEDED"))
    assert ray.submission().follow() == "SUCCEEDED"
    assert [method for method, _, _ in ray.asked].count("POST") == 1


def test_ray_that_stays_away_ends_the_run() -> None:
    ray = Ray(state("RUNNING"), forever=OSError("no route to host"))
    with pytest.raises(RunError, match="has not answered for 120 s: no route to host"):
        ray.submission().follow()
    assert OUTAGE_S < ray.now <= OUTAGE_S + 2 * POLL_S


def test_a_job_that_a_new_head_does_not_know_is_lost() -> None:
    ray = Ray(UNKNOWN, TAKEN, state("RUNNING"), UNKNOWN)
    with pytest.raises(RunError, match="head was replaced"):
        ray.submission().follow()


@pytest.mark.parametrize("code", [400, 401, 403])
def test_a_refused_job_is_not_submitted_again(code: int) -> None:
    ray = Ray(UNKNOWN, (code, "Traceback ...\nValueError: pip must be a list\n"))
    with pytest.raises(RunError, match=rf"refuses job one \({code}\): ValueError: pip must be a list$"):
        ray.submission().follow()


def test_the_log_of_the_driver_is_copied_line_by_line() -> None:
    ray = Ray(*[state("RUNNING")] * 3, state("SUCCEEDED"))
    submission, seen = ray.submission(), ["", "one\ntw", "one\ntwo\n", "one\ntwo\nthree"]
    submission.sleep = lambda seconds: grow()

    def grow() -> None:
        seen.pop(0)
        ray.log = 200, json.dumps({"logs": seen[0]})
        ray.sleep(POLL_S)

    assert submission.follow() == "SUCCEEDED"
    assert ray.told == ["job one: RUNNING", "one", "two", "three", "job one: SUCCEEDED"]


def test_a_long_log_is_read_less_often_and_a_too_long_one_not_at_all() -> None:
    ray = Ray(forever=state("RUNNING"))
    log = DriverLog("one", ray.ask, ray.told.append)
    ray.log = 200, json.dumps({"logs": f"{'x' * (30 * LOG_BYTES_PER_S)}\n"})
    for now in range(0, 60, 5):
        log.copy_new(now, ended=False)
    assert ray.logs_asked == 2
    ray.log = TOO_LONG, ""
    for now in range(60, 600, 5):
        log.copy_new(now, ended=False)
    log.copy_new(600, ended=True)
    assert (ray.logs_asked, ray.told[-1]) == (3, "the log is too long to be shown here; the object store has all of it")


@pytest.mark.parametrize(
    "answer",
    [OSError("connection reset"), (404, "no log"), (500, "Traceback"), (200, "<html>"), (200, "[]")],
)
def test_a_log_that_cannot_be_read_does_not_end_the_run(answer: Answer) -> None:
    ray = Ray(*[state("RUNNING")] * 100, state("SUCCEEDED"))
    ray.log = answer
    assert ray.submission().follow() == "SUCCEEDED"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """A dashboard that echoes requests, and breaks off one answer."""

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            text = json.dumps([self.path, self.headers["Authorization"], json.loads(body)]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text) + 100 * (self.path == "/broken")))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(MAX_BYTES + 1))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write no log."""

    with HTTPServer(("127.0.0.1", 0), Echo) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.parametrize(("token", "header"), [("secret", "Bearer secret"), (None, None)])
def test_requests_carry_rays_token(server: HTTPServer, token: str | None, header: str | None) -> None:
    ask = dashboard(f"127.0.0.1:{server.server_port}", token)
    code, text = ask("POST", "/api/jobs/", {"a": "$é"})
    assert (code, json.loads(text)) == (200, ["/api/jobs/", header, {"a": "$é"}])


def test_http_errors_are_answers_and_other_errors_are_raised(server: HTTPServer) -> None:
    ask = dashboard(f"127.0.0.1:{server.server_port}", None)
    assert ask("PUT", "/", None)[0] == 501
    with pytest.raises(OSError, match="is incomplete"):
        ask("POST", "/broken", {})
    with pytest.raises(OSError, match="refused"):
        dashboard("127.0.0.1:1", None)("GET", "/", None)


def test_a_too_long_answer_is_not_read(server: HTTPServer) -> None:
    assert dashboard(f"127.0.0.1:{server.server_port}", None)("GET", "/", None) == (TOO_LONG, "")
