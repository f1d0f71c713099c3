"""A small model hub on this machine, which answers as the real one does."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40
GATED, STALLED = "owner/gated", "owner/stalled"


class Hub(ThreadingHTTPServer):
    """Hub with files by `OWNER/NAME/FILE`; one more repository is gated, and one never answers."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.closing = files, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        repository, _, rest = self.path.split("?")[0].strip("/").partition("/resolve/")
        revision, _, filename = rest.partition("/")
        if repository == STALLED:
            self.server.closing.wait()
        elif repository == GATED:
            self.refuse(403, "GatedRepo")
        elif not any(file.startswith(f"{repository}/") for file in self.server.files):
            self.refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif (content := self.server.files.get(f"{repository}/{filename}")) is None:
            self.refuse(404, "EntryNotFound")
        else:
            self.send(content, body)

    def send(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Suppress log messages."""
