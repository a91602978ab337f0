"""Doors into a training that other code runs: a callback for the Trainer of transformers and TRL, and a script that a
launcher starts by `-m lockstep_trace`.

Neither library is imported: a callback is whatever has the methods that Trainer calls.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Callback:
    """Traces what `Trainer.train` does: `Trainer(..., callbacks=[lockstep_trace.Callback()])`, also TRL's trainers.

    `folder`: of the trace (default: LOCKSTEP_TRACE, else lockstep-trace). `level`: losses, gradients or modules. Each
    process writes a file of its own; none communicates. A process that is traced already goes on into its own folder.
    Errors: `ValueError` for a level that does not exist."""

    def __init__(self, folder: str | Path | None = None, level: str = "gradients") -> None:
        from lockstep_trace.tracer.settings import LEVELS

        if level not in LEVELS:
            raise ValueError(f"level: invalid value {level!r}; expected one of {', '.join(LEVELS)}")
        self.folder, self.level = folder, level
        self._own = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer is about to make its first step."""
        from lockstep_trace import _folder, _tracer
        from lockstep_trace.tracer.settings import Settings

        tracer = _tracer()
        if tracer.running() is None:
            self._own = True
            tracer.begin(Settings(_folder(self.folder), level=self.level))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer has made its last step."""
        from lockstep_trace import _tracer

        if self._own:
            self._own = False
            _tracer().end()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The other events of Trainer, of this and of later versions, do nothing."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def run_script(words: list[str]) -> None:
    """Run a Python script in this process, traced into LOCKSTEP_TRACE, else lockstep-trace: what `accelerate launch -m
    lockstep_trace train.py --lr 1e-3` does on each rank. `words`: the script and its arguments."""
    from lockstep_trace import _folder, _tracer
    from lockstep_trace.tracer.settings import Settings

    tracer = _tracer()
    if tracer.running() is None:
        tracer.begin(Settings(_folder(None)))
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
