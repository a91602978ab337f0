"""Record each optimizer step of any PyTorch training, and compare recordings: docs/how-to/trace.md.

Four ways to record: `lockstep-trace record -o DIR -- COMMAND` records a command. `import lockstep_trace` as the first
line of a script records it into the folder $LOCKSTEP_TRACE (default: lockstep-trace). `with
lockstep_trace.traced(model, optimizer):` records a block. `Trainer(..., callbacks=[lockstep_trace.Callback()])` records
a Trainer. `tracer/` runs in the traced process and imports only torch; the other files read its traces and import
numpy.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep_trace.doors import DEFAULT, Callback, LightningCallback, ScopedTrace

__all__ = ["DEFAULT", "Callback", "LightningCallback", "traced"]
__version__ = "0.1.0"  # equals that of lockstep-train: tests/repo/test_packages.py


@contextmanager
def traced(
    model: Any,
    optimizer: Any,
    folder: str | Path | None = None,
    level: str = "gradients",
    check: Sequence[int] = (),
    step: int | None = None,
) -> Iterator[Path]:
    """Trace the steps of `optimizer` within a `with` block, and yield the trace's folder.

    `model`: the module that holds the parameters, wrapped or not. `folder`: default: $LOCKSTEP_TRACE, else
    lockstep-trace; an older trace there is replaced; not used if a command records this process. `level`: losses,
    gradients, modules or operations. `check`: steps to recompute on copies, counted from 0. `step`: at the level
    operations, the step whose operations are recorded (default: 0). Not collective. Errors: `ValueError` for an unknown
    level."""
    recording = ScopedTrace(folder, level, check, step)
    recorder = recording.begin()
    recorder.root(model)
    recorder.number_of(optimizer)
    try:
        yield Path(recorder.settings.folder)
    finally:
        recording.end()


def _imported_by_script() -> bool:
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
    return here[-2].argval is None  # a tuple of names for `from lockstep_trace import ...`


if _imported_by_script() and "lockstep_tracer" not in sys.modules:
    ScopedTrace.by_import = ScopedTrace().begin()
