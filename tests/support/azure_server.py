"""Azure's object store protocol on this machine: Azurite, Microsoft's test server, behind the fault-injecting proxy of
`store_server`.

In: nothing. Out: `Azure` as a context, whose `environment` directs obstore to it; the test is skipped without the
program: `npm install azurite`, with its node_modules/.bin on PATH.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest

from support.store_server import BUCKET, Proxy

_ACCOUNT = "devstoreaccount1"  # Azurite's account, and its key from Azure's documentation
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_TOLD = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--disableProductStyleUrl"]


class Azure(Proxy):
    """The server, with an empty container."""

    root = f"/{_ACCOUNT}/{BUCKET}"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __enter__(self) -> Azure:
        program = shutil.which("azurite-blob")
        if program is None:
            pytest.skip("needs Azurite (npm install azurite, its node_modules/.bin on PATH)")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *_TOLD]
        with open(self.folder / "server.log", "wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self.open(port)
        self._make_container()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._server.terminate()
        self._server.wait(20)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that send requests to the proxy."""
        emulator = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": self.address, "NO_PROXY": "*"}
        return emulator | {"AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": _KEY}

    def _make_container(self) -> None:
        for _ in range(600):
            try:
                return urllib.request.urlopen(self._making(), timeout=10).close()
            except urllib.error.HTTPError:
                raise
            except OSError:  # it does not listen yet
                assert self._server.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text())

    def _making(self) -> urllib.request.Request:
        own = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        # "Authorize with Shared Key": the method, eleven empty headers, own headers, the account and the path
        signed = "\n".join(["PUT", *[""] * 11, *(f"{k}:{v}" for k, v in own.items()), f"/{_ACCOUNT}{self.root}"])
        signed += "\nrestype:container"
        code = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
        headers = own | {"Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(code).decode()}"}
        at = f"http://127.0.0.1:{self.port}{self.root}?restype=container"
        return urllib.request.Request(at, headers=headers, method="PUT")
