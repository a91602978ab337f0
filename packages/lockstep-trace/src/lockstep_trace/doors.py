"""Tracing of trainings run by other code: callbacks for the Trainer of transformers and TRL and for that of Lightning,
and scripts started by `-m lockstep_trace`. axolotl.py has the plug-in of axolotl.

Imports none of these libraries: any object with the methods that transformers calls is a callback, and Lightning's
class is imported when a callback for it is made.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep_trace import streams

DEFAULT = "lockstep-trace"  # folder of a trace
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, with a class each


class ScopedTrace:
    """A trace of a part of a process. A command that records the process takes precedence over it; so does `import
    lockstep_trace`, unless another folder or level is given.

    Arguments and errors are those of `lockstep_trace.traced`."""

    by_import: Any = None  # recorder that `import lockstep_trace` began

    def __init__(
        self,
        folder: str | Path | None = None,
        level: str = "gradients",
        check: Sequence[int] = (),
        step: int | None = None,
    ) -> None:
        from lockstep_trace.tracer import LEVELS

        if level not in LEVELS:
            raise ValueError(f"level: invalid value {level!r}; expected one of {', '.join(LEVELS)}")
        self.folder, self.level, self.check, self.step = folder, level, tuple(check), step
        self._own = False

    def begin(self) -> Any:
        """Begin to trace this process, unless that is done already, and return the recorder."""
        tracer, folder = running_tracer(), _absolute(self.folder)
        recorder = tracer.running()
        other = recorder is not None and self.folder is not None and recorder.settings.folder != folder
        if recorder is not None and recorder is ScopedTrace.by_import:
            if other or recorder.settings.level != self.level:
                recorder = None
        elif other:
            place = recorder.settings.folder
            text = f"lockstep trace: this process is traced already, into {place}; {self.folder} is not used\n"
            streams.put(sys.stderr, text)
        if recorder is None:
            from lockstep_trace.tracer import Settings

            self._own = True
            recorder = tracer.begin(Settings(folder, level=self.level, check=self.check, replace=True, step=self.step))
        return recorder

    def end(self) -> None:
        """End the trace, if `begin` began it."""
        if self._own:
            self._own = False
            running_tracer().end()


def running_tracer() -> Any:
    """Return the tracer of this process: the one injected by the command, if any."""
    if "lockstep_tracer" in sys.modules:
        return sys.modules["lockstep_tracer"]
    from lockstep_trace import tracer

    return tracer


def _absolute(folder: str | Path | None) -> str:
    return str(Path(folder or os.environ.get("LOCKSTEP_TRACE") or DEFAULT).absolute())


class Callback:
    """Traces `Trainer.train` of transformers and TRL: `Trainer(..., callbacks=[lockstep_trace.Callback()])`.

    Arguments and errors are those of `traced`. Each process writes its own file, without communication."""

    def __init__(
        self,
        folder: str | Path | None = None,
        level: str = "gradients",
        check: Sequence[int] = (),
        step: int | None = None,
    ) -> None:
        self._recording = ScopedTrace(folder, level, check, step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the trace before Trainer's first step."""
        self._recording.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the trace after Trainer's last step."""
        self._recording.end()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore all other events of Trainer, of any version."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def LightningCallback(folder: str | Path | None = None, level: str = "gradients", check: Sequence[int] = ()) -> Any:
    """Return a callback that traces `fit` of Lightning: `Trainer(..., callbacks=[lockstep_trace.LightningCallback()])`.

    Works with the Trainer of `lightning` and that of `pytorch_lightning`. Arguments and errors are those of `Callback`;
    `ImportError` if neither library is installed."""
    return _lightning_class()(folder, level, check)


@functools.cache
def _lightning_class() -> Any:
    if not any(sys.modules.get(name) for name in LIGHTNING):
        for name in LIGHTNING:
            try:
                importlib.import_module(name)
                break
            except ModuleNotFoundError:
                continue
        else:
            raise ImportError("LightningCallback needs Lightning: pip install lightning")
    bases = tuple(sys.modules[name].Callback for name in LIGHTNING if sys.modules.get(name))

    def begin(self: Any, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.recording.begin()

    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        self.recording.end()

    def init(self: Any, folder: str | Path | None, level: str, check: Sequence[int]) -> None:
        self.recording = ScopedTrace(folder, level, check)

    def reduce(self: Any) -> Any:  # for ranks that are spawned
        return LightningCallback, (self.recording.folder, self.recording.level, self.recording.check)

    methods = {"__init__": init, "__reduce__": reduce, "setup": begin, "teardown": end, "on_exception": end}
    return type("LightningCallback", bases, methods)


def run_script(words: list[str]) -> None:
    """Run a Python script in this process, traced into $LOCKSTEP_TRACE, else lockstep-trace.

    `accelerate launch -m lockstep_trace train.py --lr 1e-3` calls this on each rank. `words`: the script and its
    arguments."""
    if running_tracer().running() is None:
        ScopedTrace().begin()
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
