"""A local object store (moto's S3 server), and a proxy in front of it that injects faults.

In: requests of obstore (`Store.environment` directs them to the proxy). Out: a bucket whose objects a test can inspect
and change, and the requests. `fault`: a function of each request whose result replaces the store's answer, or happens
on the way.
"""

from __future__ import annotations

import http.client
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "bucket"
SECRET = "a-secret-key-of-these-tests-4711"
_BLOCK = 2**14


@dataclass(frozen=True)
class Asked:
    """A request: `key` of the object, `listing`: whether names are requested."""

    method: str
    key: str
    listing: bool
    start: int  # of the requested bytes


class Proxy:
    """Forwards requests to a server; started with it."""

    root = f"/{BUCKET}"  # prefix of object paths

    def __init__(self) -> None:
        self.fault: Callable[[Asked], str | int | None] = lambda asked: None
        self.hidden: Callable[[str], bool] = lambda key: False  # names that a listing leaves out
        self.asked: list[Asked] = []
        self.slow_s = 0.0  # seconds per block of 16 KiB
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._proxy.daemon_threads = True
        self.port = 0  # of the server

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._proxy.server_port}"

    def open(self, port: int) -> None:
        self.port = port
        threading.Thread(target=self._proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()

    def sent(self, pattern: str, method: str = "PUT") -> int:
        """Number of requests for objects with such names."""
        return sum(1 for each in self.asked if each.method == method and re.search(pattern, each.key))


class Store(Proxy):
    """The server and its proxy, as a context."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        super().__init__()
        # one line per request would hide a failing test's own output
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def __enter__(self) -> Store:
        self._moto.start()
        self.open(int(self._moto.get_host_and_port()[1]))
        self.client = self._client()
        self.client.create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._moto.stop()

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="AKIAIOSFODNN7EXAMPLE",
            aws_secret_access_key=SECRET,
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send requests to the proxy."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "NO_PROXY": "*",
        }

    @property
    def as_google(self) -> dict[str, str]:
        """Return the variables for gs://: for obstore, Google's XML API equals S3's protocol."""
        return {"GOOGLE_BASE_URL": self.address, "GOOGLE_BEARER_TOKEN": "a-token", "NO_PROXY": "*"}

    def clear(self) -> None:
        """Restore the initial state."""
        self.fault, self.hidden, self.slow_s = (lambda asked: None), (lambda key: False), 0.0
        for key in self.names():
            self.remove(key)
        self.asked.clear()

    def names(self, prefix: str = "") -> list[str]:
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(each["Key"] for each in listed)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def flip(self, key: str) -> None:
        """Flip one bit in the middle of an object."""
        content = bytearray(self.get(key))
        content[len(content) // 2] ^= 1
        self.put(key, bytes(content))


class _Handler(BaseHTTPRequestHandler):
    """Forwards a request. A fault is a status, `cut` (closed half way), or `silent`."""

    store: Proxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, http.client.HTTPException):  # the other side has closed
            self.close_connection = True

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(self.store.root).strip("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        start = re.match(r"bytes=(\d+)", self.headers.get("Range", ""))
        listing = "list-type" in query or query.get("comp") == ["list"]
        asked = Asked(self.command, key, listing, int(start[1]) if start else 0)
        self.store.asked.append(asked)
        fault = self.store.fault(asked)
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "cut" and self.command == "PUT":
            self.rfile.read(length // 2)
            return self._hang_up()
        body = self._slowly_read(length)
        if isinstance(fault, int):
            told = f"<Error><Code>Injected</Code><Message>{SECRET}</Message></Error>".encode()
            return self._send(fault, [], b"" if self.command == "HEAD" else told)
        link = http.client.HTTPConnection("127.0.0.1", self.store.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "host")}
        link.request(self.command, self.path, body, headers)
        answer = link.getresponse()
        content = answer.read()
        if asked.listing:
            content = re.sub(
                rb"<Contents>.*?</Contents>",
                lambda found: b"" if self.store.hidden(_name(found[0])) else found[0],
                content,
                flags=re.DOTALL,
            )
        cut = fault == "cut"
        self._send(answer.status, answer.getheaders(), content[: len(content) // 2] if cut else content, len(content))
        return self._hang_up() if cut else None

    def _slowly_read(self, length: int) -> bytes:
        body = b""
        while len(body) < length:
            body += self.rfile.read(min(_BLOCK, length - len(body)))
            time.sleep(self.store.slow_s)
        return body

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        of_head = next((value for name, value in headers if name.lower() == "content-length"), "0")
        self.send_header("Content-Length", of_head if self.command == "HEAD" else str(length or len(content)))
        self.end_headers()
        for at in range(0, len(content) if self.command != "HEAD" else 0, _BLOCK):
            self.wfile.write(content[at : at + _BLOCK])
            time.sleep(self.store.slow_s)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer


def _name(listed: bytes) -> str:
    found = re.search(rb"<Key>(.*?)</Key>", listed)
    return found[1].decode() if found else ""


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    pytest.importorskip("obstore", reason="needs the extras stores and cloud-tests")
    pytest.importorskip("moto", reason="needs the extras stores and cloud-tests")
    with Store() as store:
        yield store
