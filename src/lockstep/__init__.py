"""lockstep: distributed training of text transformers, the same bits on one process or many.

In: `Run.load(...)`. Out: `train`, `evaluate`, `predict`, `verify`: see docs/python.md. Importing this imports neither
torch nor anything else: each name is fetched when it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["JobFailed", "Result", "Run", "RunError", "Verdict", "evaluate", "predict", "train", "verify"]

if TYPE_CHECKING:
    from lockstep.api import JobFailed, Result, Verdict, evaluate, predict, train, verify
    from lockstep.run import Run, RunError

_HOMES = {name: "lockstep.run" if name in ("Run", "RunError") else "lockstep.api" for name in __all__}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`lockstep.train` is the function, also once the module of that name was imported: importing a module sets it as
    an attribute of its package, and that is passed over here. `from lockstep.train import ...` finds the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
