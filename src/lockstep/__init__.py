"""lockstep: distributed training of text transformers, the same bits on one process or many.

In: `Run.load(...)`. Out: `train`, `fit`, `evaluate`, `predict`, `verify`, `replay`, `load` (docs/how-to/python.md).
Importing this package imports neither torch nor anything else heavy: each name is loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__ as __version__

__all__ = [
    "Event",
    "JobFailed",
    "Result",
    "Run",
    "RunError",
    "Verdict",
    "evaluate",
    "fit",
    "load",
    "predict",
    "replay",
    "train",
    "verify",
]

if TYPE_CHECKING:
    from lockstep.api import Event, JobFailed, Result, Verdict, evaluate, fit, load, predict, replay, train, verify
    from lockstep.config.run import Run, RunError

_HOMES = {name: "lockstep.config.run" if name in ("Run", "RunError") else "lockstep.api" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
