"""Modules that are imported when they are first used: readers, stores and checks that most runs do not need.

A file names them at its top, where type checkers see them as imports:

    if TYPE_CHECKING:
        from lockstep.data import hub_rows, row_files
    else:
        hub_rows, row_files = lazy("lockstep.data", "hub_rows", "row_files")

Only for modules that a run file asks for, never for what every run needs later: a package that is upgraded while a run
trains must not change what the run ends with. Python 3.15 has the statement `lazy import` for this (PEP 810).
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module, whose attributes it has."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def lazy(package: str, *names: str) -> list[Lazy]:
    """Return modules of a package that are imported at their first use."""
    return [Lazy(f"{package}.{name}") for name in names]
