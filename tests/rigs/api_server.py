"""An HTTP server with given answers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """An API server with given answers in turn; the last one repeats."""

    answers: list[tuple[int, object]]
    asked: list[tuple[str, str, Any]]
    authorizations: list[str | None]
    cut: bool = False
    """Whether answers break off before their end."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.server.asked.append((self.command, self.path, json.loads(self.rfile.read(length) or "null")))
        self.server.authorizations.append(self.headers.get("Authorization"))
        status, body = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) + self.server.cut))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def log_message(self, *arguments: object) -> None:
        pass
