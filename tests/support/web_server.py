"""A web server on the loopback with changeable files and fault injection.

In: requests for files of `Served.files`. Out: their bytes, by ranges, with ETags. A fault is a status, "cut" for an
answer that ends half way, or "slow".
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Served:
    """The server, as a context; its state is plain attributes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[int | str]] = {}  # file -> faults, one per answer with its bytes
        self.asked: list[str] = []  # files whose bytes were requested
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": self}))
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Served:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        name = self.path.strip("/")
        content, fault = self.served.files.get(name), None
        if self.command == "GET":
            self.served.asked.append(name)
            faults = self.served.faults.get(name, [])
            fault = faults.pop(0) if faults else None
        if isinstance(fault, int) or content is None:
            return self._send(fault if isinstance(fault, int) else 404, b"", 0)
        if fault == "slow":
            time.sleep(0.3)
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        part = content[int(start[1]) :] if start else content
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._send(206 if start else 200, part[: len(part) // 2] if fault == "cut" else part, len(part), tag)

    do_GET = do_HEAD = _any

    def _send(self, status: int, body: bytes, length: int, tag: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.close_connection = len(body) < length

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def web() -> Iterator[Served]:
    with Served() as served:
        yield served
