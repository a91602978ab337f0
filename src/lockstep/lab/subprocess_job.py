"""A `lockstep` job in a process of its own, for whoever starts several or must not become a rank: a notebook, a sweep,
a benchmark.

In: the dotted name of a function of a list of words that returns an exit status, and the words. Out: its exit status,
and what it printed, in two files. A child whose parent is gone stops as if asked to, and writes its checkpoint.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.config.errors import STOPPED
from lockstep.config.run import RunError
from lockstep.track.console import error
from lockstep_trace import streams

# A notebook's kernel sets some of these; a child writes to a file, where a progress bar is noise.
_TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Child:
    """One process, started at once. Its standard output and errors are appended to `FOLDER/NAME.out` and `.err`."""

    def __init__(
        self, function: str, words: Sequence[str], folder: Path, name: str, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are set for it beside those of this process. Errors: `OSError`."""
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self._read_bytes = _size(self.out)
        self._erred = _size(self.err)
        self._stop_requested = False
        command = [sys.executable, "-m", "lockstep.lab.subprocess_job", function, *words]
        inherited = {name: value for name, value in os.environ.items() if name not in _TERMINAL}
        with open(self.out, "ab") as out, open(self.err, "ab") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # never written to: its end is this process's end
                stdout=out,
                stderr=err,
                env={**inherited, "PYTHONPATH": import_path(), **(variables or {})},
                start_new_session=True,  # Ctrl-C reaches this process only, which then asks
            )

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs; one that was asked to stop before it could listen has been stopped."""
        code = self._process.poll()
        return STOPPED if self._stop_requested and code in (-signal.SIGTERM, -signal.SIGINT) else code

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, or for so long. Returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin is not None:
            self._process.stdin.close()
        return True

    def stop(self) -> None:
        """Ask it to stop: a job that trains finishes its step and writes a checkpoint. Does not wait."""
        self._stop_requested = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        self._stop_requested = True
        if self._process.poll() is None and sys.platform != "win32":
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self.wait()

    def lines(self) -> Iterator[str]:
        """Whole lines of its standard output since the last call."""
        with open(self.out, "rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n") and self.status is None:
                    return  # half a line: the rest is still to come
                self._read_bytes += len(line)
                yield line.decode(errors="replace").rstrip("\n")

    @property
    def errors(self) -> str:
        """Its standard error so far, without our own name in front."""
        with open(self.err, "rb") as file:
            file.seek(self._erred)
            return file.read().decode(errors="replace").strip().removeprefix("lockstep: ")

    def reason(self, most: int = 300) -> str:
        """Why it failed, on one line: our own message, or the last line of a traceback."""
        text = self.errors
        if "Traceback" in text:
            after = text.partition("Traceback")[2].splitlines()[1:]
            text = next((line for line in after if line and not line.startswith((" ", "Traceback"))), text)
        text = " ".join(text.split()) or f"ended with status {self.status}, and said nothing"
        return text if len(text) <= most else f"{text[: most - 4]} ..."


def import_path() -> str:
    """Where this process imports modules of the user's from (a script's folder, a notebook's additions)."""
    prefixes = (sys.prefix, sys.base_prefix)
    return os.pathsep.join(path for path in sys.path if path and not path.startswith(prefixes))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _follow_parent() -> None:
    """Stop as if asked to when the parent is gone: its end of our standard input closes."""
    stdin = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what we start must not read it

    def watch() -> None:
        while os.read(stdin, 64):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()


def main(words: list[str]) -> int:
    """In the child: run the function to its end."""
    streams.make_safe()
    _follow_parent()
    module, _, function = words[0].rpartition(".")
    try:
        return getattr(importlib.import_module(module), function)(words[1:])
    except RunError as caught:
        error(str(caught))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set when this process is asked to stop; a second Ctrl-C does not wait for children."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(number: int, frame: object) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
