"""Runs a command with the tracer in every Python process that it starts.

In: a command, a folder for the trace. Out: the command's exit status; in the folder, `trace.json` (the command and its
status), `inject/` (added to PYTHONPATH), and one file per training process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep_trace import streams
from lockstep_trace.coded import TraceError
from lockstep_trace.read import ABOUT, about
from lockstep_trace.redaction import printable, redact, redact_words
from lockstep_trace.tracer import Settings

INJECT = "inject"
SOURCES = Path(__file__).parent
JOIN_S = 1.0  # wait for the last output; a process that outlives the command keeps the pipe open


def run(command: Sequence[str], folder: Path, log: Path | None = None, **settings: Any) -> int:
    """Trace a command into a new folder and return its exit status.

    The status is 128 + N if signal N ended the command, 127 if it cannot be started. The command inherits the standard
    streams. `log`: file for its standard output and errors instead; a terminal shows their last line while it runs.
    `settings`: fields of `Settings`, except `folder`. Errors: `TraceError`."""
    folder = folder.absolute()
    prepare(folder, command, Settings(str(folder), **settings))
    began = time.time()
    environment = environment_of(folder)
    stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if log is not None else (None, None)
    try:
        process = subprocess.Popen(list(command), env=environment, stdout=stdout, stderr=stderr)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TraceError("LS9030", f"{command[0]!r} cannot be started: {error.strerror or error}") from None
    copier = threading.Thread(target=_copy, args=(process, log), daemon=True)
    if log is not None:
        copier.start()
    status = _wait(process)
    if log is not None:
        copier.join(JOIN_S)
        if sys.stderr.isatty():
            streams.put(sys.stderr, streams.CLEAR, flush=True)
    _note(folder, ended=time.time(), seconds=time.time() - began, status=status)
    return status


def prepare(folder: Path, command: Sequence[str], settings: Settings) -> None:
    """Create the trace's folder, replacing an older trace. Errors: `TraceError` if it holds anything else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / ABOUT).is_file():
            raise TraceError("LS9031", f"{folder} exists and is not a trace; give another folder with -o")
        shutil.rmtree(folder)  # an older trace
    inject = folder / INJECT
    inject.mkdir(parents=True)
    shutil.copy(SOURCES / "injected" / "sitecustomize.py", inject)
    shutil.copytree(SOURCES / "tracer", inject / "tracer", ignore=shutil.ignore_patterns("__pycache__"))
    settings.save(inject / "settings.json")
    values = {"format": 1, "command": redact_words(command), "began": time.time(), "cwd": os.getcwd()}
    values |= {"every": settings.every, "steps": settings.steps, "level": settings.level, "perturbed": settings.perturb}
    if settings.level == "operations":
        values["step"] = settings.step or 0
    (folder / ABOUT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def note_difference(folder: Path, step: int) -> None:
    """Note in a trace the step in which a comparison saw the first difference. A trace recorded without the command, or
    in a folder that cannot be written, stays as it is."""
    if (folder / ABOUT).is_file():
        with suppress(OSError):
            _note(folder, first_difference=step)


def step_of_difference(folder: Path, command: Sequence[str]) -> int | None:
    """Return the step of `note_difference` if a folder holds a trace of the same command."""
    values = about(folder) if folder.is_dir() else {}
    step = values.get("first_difference")
    return step if isinstance(step, int) and values.get("command") == redact_words(command) else None


def environment_of(folder: Path) -> dict[str, str]:
    """Return this process's environment with the tracer first on PYTHONPATH, without an outer trace's folder."""
    path = [str(folder / INJECT)]
    path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).name != INJECT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _wait(process: subprocess.Popen[bytes]) -> int:
    passed = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _: process.send_signal(n))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = process.wait()
    finally:
        for number, handler in passed.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    """Copy the output of a command to a file, without secrets, and show its last line on a terminal."""
    assert process.stdout is not None
    live, line = sys.stderr.isatty(), b""
    with log.open("w", encoding="utf-8") as file:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            *complete, line = (line + chunk).split(b"\n")
            file.writelines(f"{redact(text.decode(errors='replace'))}\n" for text in complete)
            file.flush()
            texts = [text for text in [*complete[-1:], *line.split(b"\r")] if text.strip()] if live else []
            for text in texts[-1:]:
                fitting = printable(text.decode(errors="replace"))[: shutil.get_terminal_size().columns - 1]
                streams.put(sys.stderr, f"{streams.CLEAR}{fitting}", flush=True)
        file.write(redact(line.decode(errors="replace")))


def _note(folder: Path, **values: Any) -> None:
    text = json.dumps(about(folder) | values, indent=1)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
