"""Waits for an engine to be imported, and installs what listens to it then."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .hooks import Hooks

ENGINE = "deepspeed"


class EngineFinder:
    """Finds DeepSpeed as Python would, and calls `install` after its import."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # who asks whether it is there does not import it yet
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            load(module)
            install(self.hooks)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def install(hooks: Hooks) -> None:
    from . import deepspeed_engine

    hooks.guarded(deepspeed_engine.install, hooks)


def watch(hooks: Hooks) -> None:
    """Listen to the engine now, or when it is imported."""
    module = sys.modules.get(ENGINE)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        hooks.at_first_call = install  # the engine's own import of torch began the trace
    elif module is not None:
        install(hooks)
    else:
        sys.meta_path.insert(0, EngineFinder(hooks))
