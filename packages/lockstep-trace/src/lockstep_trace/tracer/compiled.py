"""Hides the recording of operations from `torch.compile`, which would fall back to eager mode under a dispatch mode.

A compiled region becomes one entry, and runs as it does without the tracer. In: `Hooks`. Out: calls of the region's
`around`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol

MODULE = "torch._dynamo.eval_frame"
CONTEXTS = ("_TorchDynamoContext", "OptimizeContext")


class Regions(Protocol):
    """Names of compiled regions, for messages."""

    def around(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a compiled function and return its result."""


class _Finder:
    """Import finder that wraps the compiler's contexts once they are imported."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _wrap(module, self.regions)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def install(regions: Regions) -> None:
    """Wrap everything that `torch.compile` compiles from now on. `call_site` sees those compiled before."""
    if MODULE in sys.modules:
        _wrap(sys.modules[MODULE], regions)
    else:
        sys.meta_path.insert(0, _Finder(regions))


def _wrap(module: Any, regions: Regions) -> None:
    for name in CONTEXTS:
        kind = getattr(module, name, None)
        if kind is not None and "__call__" in vars(kind):
            kind.__call__ = _outside(kind.__call__, getattr(module, "DisableContext", ()), regions)


def _outside(original: Any, disabling: Any, regions: Regions) -> Any:
    @functools.wraps(original)
    def call(self: Any, function: Any) -> Any:
        result = original(self, function)
        if isinstance(self, disabling) or not isinstance(result, types.FunctionType):
            return result  # called from a module's own forward

        @functools.wraps(result)  # with the attributes by which dynamo finds the function inside
        def compiled(*args: Any, **kwargs: Any) -> Any:
            return regions.around(result, args, kwargs)

        return compiled

    return call
