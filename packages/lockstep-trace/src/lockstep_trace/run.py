"""Run a command with the tracer in every Python process that it starts.

In: a command, a folder for the trace. Out: the command's own exit status; in the folder `trace.json` (the command and
how it ended), `inject/` (what is on the processes' PYTHONPATH), and a file of each process that trained.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep_trace.errors import TraceError
from lockstep_trace.read import ABOUT, about
from lockstep_trace.redaction import redact_words
from lockstep_trace.tracer.settings import Settings

INJECT = "inject"
SOURCES = Path(__file__).parent


def run(command: Sequence[str], folder: Path, **settings: Any) -> int:
    """Trace a command into a new folder. `settings`: of `Settings`, but `folder`. Standard streams are the command's
    own. Returns its exit status; 128 + N where signal N ended it, 127 where it cannot be started. Errors:
    `TraceError`."""
    folder = folder.absolute()
    prepare(folder, command, Settings(str(folder), **settings))
    began = time.time()
    environment = environment_of(folder)
    try:
        process = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TraceError("LS9030", f"{command[0]!r} cannot be started: {error.strerror or error}") from None
    status = _wait(process)
    _note(folder, ended=time.time(), seconds=time.time() - began, status=status)
    return status


def prepare(folder: Path, command: Sequence[str], settings: Settings) -> None:
    """Make the trace's folder. Errors: `TraceError` where it holds something already."""
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
    (folder / ABOUT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def environment_of(folder: Path) -> dict[str, str]:
    """This process's, with the tracer's folder first on PYTHONPATH. An outer trace's folder is taken off."""
    path = [str(folder / INJECT)]
    path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).name != INJECT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Pass signals on, and wait. The terminal sends Ctrl-C to the command by itself."""
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


def _note(folder: Path, **values: Any) -> None:
    text = json.dumps(about(folder) | values, indent=1)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
