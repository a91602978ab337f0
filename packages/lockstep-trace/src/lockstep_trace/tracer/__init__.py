"""The tracer, which runs inside the traced process and only records; `findings.py` and `rules/` judge the records.

Imports only torch and the standard library, so that it can be copied next to any script; this file not even torch. Here
are the settings of a traced process, in a file next to `sitecustomize.py` (some launchers drop environment variables),
and numbers that records and their readers share. See docs/how-to/trace.md.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooks import Hooks
    from .recorder import Recorder

BEGAN = "LOCKSTEP_TRACE_BEGAN"  # set while a run is traced; workers of its data loaders inherit it
_INSTALLED: list[Hooks] = []  # one per process
LEVELS = ("losses", "gradients", "modules", "operations")
CHECKED = (1, 10)  # steps that --check recomputes if none is given
WIDTHS = (257, 263, 269, 271, 277, 281, 283, 293)  # of sketches


def width_of(shape: Sequence[int]) -> int:
    """Return the number of a sketch's buckets: the first prime of `WIDTHS` that divides no dimension.

    If P divided the row length of a matrix, elements of a column would share a bucket."""
    return _width_of(tuple(shape))


@functools.lru_cache(maxsize=4096)
def _width_of(shape: tuple[int, ...]) -> int:
    return next((p for p in WIDTHS if all(n % p for n in shape if n)), WIDTHS[-1])


def clipping_factor(limit: float, norm: float) -> float:
    """Return the factor by which `clip_grad_norm_` multiplies; NaN if the norm is NaN."""
    return limit / (norm + 1e-6) if not limit / (norm + 1e-6) >= 1.0 else 1.0


@dataclass(frozen=True)
class Settings:
    """Settings of the recorder. `folder`: folder of the trace. `every`: measure each N-th step. `steps`: stop after
    this many steps; None: never. `perturb`: flip the last bit of half of the weights before the first forward pass.
    `replace`: replace the contents that an earlier run left in the folder; False if a command has prepared it. `check`:
    steps of each optimizer to recompute on copies. `step`: the step whose operations are recorded at the level
    `operations`; None: 0."""

    folder: str
    every: int = 1
    steps: int | None = None
    level: str = "gradients"
    perturb: bool = False
    replace: bool = False
    check: tuple[int, ...] = ()
    step: int | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "check": tuple(values.get("check", ()))})


def begin(settings: Settings) -> Recorder:
    """Start to trace this process into `settings.folder`, ending an earlier trace."""
    from .checker import Checker
    from .engines import watch
    from .graph import WITHOUT
    from .hooks import Hooks
    from .recorder import Recorder
    from .records import Writer

    new = not _INSTALLED
    if not _INSTALLED:
        hooks = Hooks()
        hooks.install()
        _INSTALLED.append(hooks)
        atexit.register(end)
    end()
    WITHOUT.clear()  # of an earlier trace
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
