"""A headless Chromium for tests of pages, through the DevTools protocol over a pipe; standard library only.

In: a local page, a width, light, dark or print. Out: a screenshot, console messages, values of expressions.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


class Browser:
    """One page. `complaints`: errors and warnings of its console, and its network requests."""

    def __init__(self, process: subprocess.Popen[bytes], to: Any, back: Any) -> None:
        self._process, self._to, self._back, self._number, self._rest = process, to, back, 0, b""
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the page."""
        return self._ask(method, self._session, **parameters)

    def open(self, path: Path, width: int, scheme: str = "light", media: str = "screen") -> None:
        """Load a page at a width in CSS pixels, and wait until it is complete."""
        self.complaints.clear()
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())
        for event in self._events:
            self._judge(event)
        self._events.clear()

    def value(self, expression: str) -> Any:
        """Evaluate a JavaScript expression."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Screenshot of the whole page as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def pdf(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"])

    def _judge(self, event: dict[str, Any]) -> None:
        found = event["params"]
        if event["method"] == "Runtime.exceptionThrown" or (
            event["method"] == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning")
        ):
            self.complaints.append(str(found))
        elif event["method"] == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(found["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent" and not found["request"]["url"].startswith(
            ("file:", "data:")
        ):
            self.complaints.append(f"asked the network for {found['request']['url']}")

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._to.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        self._to.flush()
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            if "method" in found:
                self._events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back.fileno(), 2**20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser that ends with the test."""
    here, theirs = os.pipe(), os.pipe()  # pipes for commands and for answers
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command = [*words, "--hide-scrollbars", f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec 3<&{here[0]} 4>&{theirs[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "browser", *command],
            pass_fds=(here[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(here[0])
        os.close(theirs[1])
        with open(here[1], "wb") as to, open(theirs[0], "rb") as back:
            try:
                yield Browser(process, to, back)
            finally:
                process.terminate()
                process.wait(20)
