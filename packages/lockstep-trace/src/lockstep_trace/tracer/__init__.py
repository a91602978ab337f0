"""The tracer, which runs inside the traced process and only records; `findings.py` and `rules/` judge the records.

Imports only torch and the standard library, so that it can be copied next to any script. See docs/how-to/trace.md.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hooks import Hooks
    from .recorder import Recorder
    from .settings import Settings

BEGAN = "LOCKSTEP_TRACE_BEGAN"  # set while a run is traced; workers of its data loaders inherit it
_INSTALLED: list[Hooks] = []  # one per process


def begin(settings: Settings) -> Recorder:
    """Start to trace this process into `settings.folder`, ending an earlier trace."""
    from .check.checker import Checker
    from .hooks import Hooks
    from .late_imports import watch
    from .recorder import Recorder
    from .writer import Writer

    new = not _INSTALLED
    if not _INSTALLED:
        hooks = Hooks()
        hooks.install()
        _INSTALLED.append(hooks)
        atexit.register(end)
    end()
    recorder = Recorder(settings, Writer(Path(settings.folder), settings.replace))
    if settings.check:
        recorder.checker = Checker(_INSTALLED[0], recorder, settings.check)
    _INSTALLED[0].recorder = recorder
    if settings.level == "operations":
        from .operations import begin as begin_operations

        begin_operations(_INSTALLED[0], recorder)
    if new:
        watch(_INSTALLED[0])
    return recorder


def end() -> None:
    """Write pending records and stop tracing."""
    if _INSTALLED and (recorder := _INSTALLED[0].recorder) is not None:
        _INSTALLED[0].guarded(recorder.end)
        _INSTALLED[0].guarded(_INSTALLED[0].releases.wait)
        _INSTALLED[0].recorder = None
        os.environ.pop(BEGAN, None)


def running() -> Recorder | None:
    """Return the recorder of this process, or None if it is not traced."""
    return _INSTALLED[0].recorder if _INSTALLED else None
