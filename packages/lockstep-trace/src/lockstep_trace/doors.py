"""Tracing of trainings run by other code: a callback for the Trainer of transformers and TRL, and scripts started by
`-m lockstep_trace`.

Imports neither library: any object with the methods that Trainer calls is a callback.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Callback:
    """Traces `Trainer.train` of transformers and TRL: `Trainer(..., callbacks=[lockstep_trace.Callback()])`.

    `folder`: folder of the trace; default: $LOCKSTEP_TRACE, else lockstep-trace; ignored if the process is traced
    already. `level`: losses, gradients or modules. Each process writes its own file, without communication. Errors:
    `ValueError` for an unknown level."""

    def __init__(self, folder: str | Path | None = None, level: str = "gradients") -> None:
        from lockstep_trace.tracer.settings import LEVELS

        if level not in LEVELS:
            raise ValueError(f"level: invalid value {level!r}; expected one of {', '.join(LEVELS)}")
        self.folder, self.level = folder, level
        self._own = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the trace before Trainer's first step."""
        from lockstep_trace import _folder, _tracer
        from lockstep_trace.tracer.settings import Settings

        tracer = _tracer()
        if tracer.running() is None:
            self._own = True
            tracer.begin(Settings(_folder(self.folder), level=self.level))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the trace after Trainer's last step."""
        from lockstep_trace import _tracer

        if self._own:
            self._own = False
            _tracer().end()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all other events of Trainer, of any version."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def run_script(words: list[str]) -> None:
    """Run a Python script in this process, traced into $LOCKSTEP_TRACE, else lockstep-trace.

    `accelerate launch -m lockstep_trace train.py --lr 1e-3` calls this on each rank. `words`: the script and its
    arguments."""
    from lockstep_trace import _folder, _tracer
    from lockstep_trace.tracer.settings import Settings

    tracer = _tracer()
    if tracer.running() is None:
        tracer.begin(Settings(_folder(None)))
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
