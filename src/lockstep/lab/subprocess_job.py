"""A `lockstep` job in its own process, for callers that must not become a rank: notebooks, sweeps, benchmarks.

In: the dotted name of a function (list of words -> exit status), and the words. Out: its exit status, and its output in
two files. If the parent dies, the child writes its checkpoint and stops.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.config.errors import STOPPED
from lockstep.config.output_files import open_file
from lockstep.config.run import RunError
from lockstep.track.console import error
from lockstep_trace import streams

# Variables of notebook kernels; progress bars are useless in a file.
_TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Child:
    """One child process, started at once, with standard output and errors appended to `FOLDER/NAME.out` and `.err`."""

    def __init__(
        self, function: str, words: Sequence[str], folder: Path, name: str, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start the process. `variables`: added to its environment. Errors: `OSError`."""
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        self._read_bytes = _size(self.out)
        self._erred = _size(self.err)
        self._stop_requested = False
        command = [sys.executable, "-m", "lockstep.lab.subprocess_job", function, *words]
        inherited = {name: value for name, value in os.environ.items() if name not in _TERMINAL}
        with open_file(self.out, "ab") as out, open_file(self.err, "ab") as err:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # never written to: closed when this process ends
                stdout=out,
                stderr=err,
                env={**inherited, "PYTHONPATH": import_path(), **(variables or {})},
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops the child
            )

    @property
    def status(self) -> int | None:
        """Exit status, or None while running. A child that was asked to stop before it could react counts as
        stopped."""
        code = self._process.poll()
        return STOPPED if self._stop_requested and code in (-signal.SIGTERM, -signal.SIGINT) else code

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` for its end. Returns whether it has ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin is not None:
            self._process.stdin.close()
        return True

    def stop(self) -> None:
        """Ask it to stop: a training job finishes its step and writes a checkpoint. Does not wait."""
        self._stop_requested = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and its children at once."""
        self._stop_requested = True
        if self._process.poll() is None and sys.platform != "win32":
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self.wait()

    def lines(self) -> Iterator[str]:
        """Complete lines of standard output since the last call; none if the file was removed meanwhile."""
        with suppress(FileNotFoundError), open(self.out, "rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n") and self.status is None:
                    return  # an incomplete line
                self._read_bytes += len(line)
                yield line.decode(errors="replace").rstrip("\n")

    @property
    def errors(self) -> str:
        """Standard error so far, without the prefix `lockstep:`."""
        try:
            with open(self.err, "rb") as file:
                file.seek(self._erred)
                return file.read().decode(errors="replace").strip().removeprefix("lockstep: ")
        except FileNotFoundError:
            return f"{self.err} was removed while the job ran"

    def reason(self, most: int = 300) -> str:
        """Reason of a failure in one line: lockstep's own message, or the last line of a traceback."""
        text = self.errors
        if "Traceback" in text:
            after = text.partition("Traceback")[2].splitlines()[1:]
            text = next((line for line in after if line and not line.startswith((" ", "Traceback"))), text)
        text = " ".join(text.split()) or f"ended with status {self.status}, without output"
        return text if len(text) <= most else f"{text[: most - 4]} ..."


def import_path() -> str:
    """Directories from which this process imports the user's modules (a script's folder, additions of a notebook)."""
    prefixes = (sys.prefix, sys.base_prefix)
    return os.pathsep.join(path for path in sys.path if path and not path.startswith(prefixes))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _follow_parent() -> None:
    """Stop when the parent dies, which closes our standard input."""
    stdin = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # children must not read it

    def watch() -> None:
        while os.read(stdin, 64):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lockstep-parent", daemon=True).start()


def main(words: list[str]) -> int:
    """Child process: run the function to its end."""
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
    """An event that is set when this process is asked to stop; after a second Ctrl-C it does not wait for children."""
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
