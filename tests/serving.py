"""Server that tests ask for files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Store(ThreadingHTTPServer):
    """Server that answers each path with a code and a content, other paths with 404, and counts the contents that it sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.sent = 0
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Answer(BaseHTTPRequestHandler):
    server: Store

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        code, content = self.server.answers.get(self.path.strip("/"), (404, b""))
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and content:
            self.server.sent += 1
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Suppress log messages."""


@pytest.fixture
def store() -> Iterator[Store]:
    server = Store()
    yield server
    server.shutdown()
    server.server_close()
