"""Installs the wrappers of an engine or evaluator when its module is imported."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .evaluators import EVALUATORS, SELECTORS
from .evaluators import install as install_evaluator
from .hooks import Hooks

ENGINE = "deepspeed"


class Finder:
    """Import finder that calls `install` after a module is imported."""

    def __init__(self, hooks: Hooks, module: str) -> None:
        self.hooks, self.module = hooks, module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # find_spec may only check for the module, without importing it
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            load(module)
            install(self.hooks, self.module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def install(hooks: Hooks, module: str) -> None:
    from . import deepspeed_engine

    if module == ENGINE:
        hooks.guarded(deepspeed_engine.install, hooks)
    else:
        hooks.guarded(install_evaluator, hooks, module)


def watch(hooks: Hooks) -> None:
    """Install the wrappers of each module now, or when it is imported."""
    for name in (ENGINE, *EVALUATORS, *SELECTORS):
        module = sys.modules.get(name)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            hooks.at_first_call.append(
                functools.partial(install, hooks, name)
            )  # its own import of torch began the trace
        elif module is not None:
            install(hooks, name)
        else:
            sys.meta_path.insert(0, Finder(hooks, name))
