"""A stub of KFP's API server: it answers the requests of KFP's client and keeps what it receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

API = "/apis/v2beta1/"
CREATED = {"created_at": "2026-11-30T00:00:00Z"}
RUN_ID = "1a2b3c4d-0000-4000-8000-000000000000"


@dataclass
class Kfp:
    """State of the server.

    Attributes:
        pipelines, versions, experiments, runs, schedules: the resources, as they were created.
        bodies: uploaded pipelines and versions.
        states: states of a run, one for each request; the last one stays.
        actions: what was done with runs and schedules, as `runs/ID:terminate`, and deletions.
        refusal: HTTP status and message for every request except the health check.
    """

    pipelines: list[dict[str, Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    experiments: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    states: list[str] = field(default_factory=lambda: ["SUCCEEDED"])
    actions: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    endpoint: str = ""

    def get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        """A resource, or a list of those that match the filter."""
        if path == "healthz":
            return {"multi_user": False}
        if path.startswith("runs/"):
            return {**self.runs[-1], "state": self.state()}
        if path == "runs":
            filters = json.loads(query["filter"])["predicates"]
            wanted = {predicate["key"]: predicate["stringValue"] for predicate in filters}
            state = self.state()
            return {"runs": [run | {"state": state} for run in self.runs if wanted.items() <= run.items()]}
        if path.endswith("/versions"):
            return {"pipeline_versions": matching(self.versions, query)}
        lists = {"pipelines": self.pipelines, "experiments": self.experiments, "recurringruns": self.schedules}
        key = "recurringRuns" if path == "recurringruns" else path
        return {key: matching(lists[path], query)}

    def state(self) -> str:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def post(self, path: str, query: dict[str, str], body: bytes) -> dict[str, Any]:
        """Create a resource."""
        if path == "pipelines/upload":
            self.bodies.append(body)
            created = {"pipeline_id": f"p{len(self.pipelines)}", "display_name": query["name"], **CREATED}
            self.pipelines.append(created | {"description": query.get("description", "")})
            return self.pipelines[-1]
        if path == "pipelines/upload_version":
            self.bodies.append(body)
            number = f"v{len(self.versions)}"
            version = {"pipeline_id": query["pipelineid"], "pipeline_version_id": number, "display_name": query["name"]}
            version |= {"description": query.get("description", ""), **CREATED}
            self.versions.append(version)
            return version
        if ":" in path:
            self.actions.append(path)
            return {}
        sent = json.loads(body)
        created = {
            "experiments": (self.experiments, {"experiment_id": f"e{len(self.experiments)}"}),
            "runs": (self.runs, {"run_id": RUN_ID}),
            "recurringruns": (self.schedules, {"recurring_run_id": f"s{len(self.schedules)}"}),
        }
        kind, key = created[path]
        kind.append({**sent, **key, **CREATED})
        return kind[-1]


def matching(resources: list[dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
    """The resources with the name in the filter."""
    predicates = json.loads(query.get("filter", "{}")).get("predicates", [])
    names = {predicate.get("stringValue") or predicate.get("string_value") for predicate in predicates}
    return [each for each in resources if not names or each["display_name"] in names]


class Handler(BaseHTTPRequestHandler):
    """Answers in JSON."""

    kfp: Kfp

    def do_GET(self) -> None:
        self.serve("GET", b"")

    def do_POST(self) -> None:
        self.serve("POST", self.rfile.read(int(self.headers["Content-Length"] or 0)))

    def do_DELETE(self) -> None:
        self.serve("DELETE", b"")

    def serve(self, method: str, body: bytes) -> None:
        url = urlsplit(self.path)
        path, query = url.path.removeprefix(API), {key: value[0] for key, value in parse_qs(url.query).items()}
        if self.kfp.refusal and path != "healthz":
            self.answer(self.kfp.refusal[0], {"message": self.kfp.refusal[1]})
        elif not url.path.startswith(API):
            self.answer(404, {})
        elif method == "DELETE":
            self.kfp.actions.append(f"{path}:delete")
            self.kfp.schedules = [s for s in self.kfp.schedules if s["recurring_run_id"] != path.rpartition("/")[2]]
            self.answer(200, {})
        else:
            self.answer(200, self.kfp.get(path, query) if method == "GET" else self.kfp.post(path, query, body))

    def answer(self, status: int, tree: dict[str, Any]) -> None:
        text = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        del arguments


@contextmanager
def serving() -> Iterator[Kfp]:
    """A server for the body of the `with`."""
    kfp = Kfp()
    handler = type("Handler", (Handler,), {"kfp": kfp})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    kfp.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield kfp
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
