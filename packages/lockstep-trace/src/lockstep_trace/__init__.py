"""Record what any PyTorch training does at each optimizer step, and compare recordings: docs/how-to/trace.md.

`lockstep-trace record -o DIR -- COMMAND` records a command. `import lockstep_trace` as a script's first line records
that script, into the folder that LOCKSTEP_TRACE names (default: lockstep-trace). `with lockstep_trace.traced(model,
optimizer):` records what runs inside, and `Trainer(..., callbacks=[lockstep_trace.Callback()])` what a Trainer does.
`tracer/` runs in the traced process and imports torch alone; the other files read what it wrote, and import numpy.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep_trace.doors import Callback

__all__ = ["DEFAULT", "Callback", "traced"]
__version__ = "0.1.0"  # of lockstep-train, always: tests/repo/test_packages.py
DEFAULT = "lockstep-trace"


def _tracer() -> Any:
    """The tracer of this process: the one that the command injected, where there is one."""
    if "lockstep_tracer" in sys.modules:
        return sys.modules["lockstep_tracer"]
    from lockstep_trace import tracer

    return tracer


def _folder(folder: str | Path | None) -> str:
    return str(Path(folder or os.environ.get("LOCKSTEP_TRACE") or DEFAULT).absolute())


@contextmanager
def traced(model: Any, optimizer: Any, folder: str | Path | None = None, level: str = "gradients") -> Iterator[Path]:
    """Trace the steps of `optimizer` inside a `with` block, into `folder` (default: LOCKSTEP_TRACE, else
    lockstep-trace). `model`: the module that holds the parameters, wrapped or not. Yields the folder. Not collective.
    A process that is traced already goes on into its own folder. Errors: `ValueError` for a level that does not
    exist."""
    tracer = _tracer()
    from lockstep_trace import streams
    from lockstep_trace.tracer.settings import LEVELS, Settings

    if level not in LEVELS:
        raise ValueError(f"level: invalid value {level!r}; expected one of {', '.join(LEVELS)}")
    own = tracer.running() is None
    recorder = tracer.begin(Settings(_folder(folder), level=level)) if own else tracer.running()
    if folder is not None and Path(recorder.settings.folder) != Path(_folder(folder)):
        # `import lockstep_trace` in a script traces it from there on
        place = recorder.settings.folder
        streams.put(sys.stderr, f"lockstep trace: this process is traced already, into {place}; {folder} is not used\n")
    recorder.root(model)
    recorder.number_of(optimizer)
    try:
        yield Path(recorder.settings.folder)
    finally:
        if own:
            tracer.end()


def _imported_by_script() -> bool:
    """Whether the script that runs says `import lockstep_trace`: no other module, test or notebook."""
    frame: Any = sys._getframe(1)
    while frame is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") == __name__
    ):
        frame = frame.f_back
    if (
        frame is None
        or frame.f_globals.get("__name__") not in ("__main__", "__mp_main__")
        or "ipykernel" in sys.modules
    ):
        return False
    here = [i for i in dis.get_instructions(frame.f_code) if i.offset <= frame.f_lasti]
    if len(here) < 2 or here[-1].opname != "IMPORT_NAME" or here[-1].argval != __name__:
        return False
    return here[-2].argval is None  # `from lockstep_trace import ...` loads a tuple of names there


if _imported_by_script() and "lockstep_tracer" not in sys.modules:
    from lockstep_trace.tracer.settings import Settings as _Settings

    _tracer().begin(_Settings(_folder(None)))
