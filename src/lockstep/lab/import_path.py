"""Dotted names of objects that a script or module passes to `lockstep.fit`, for import in other processes.

In: functions, classes and datasets. Out: dotted names. A script needs no `__main__` guard: a process that imports it
stops at its first call that starts a job (`plugins.starts_a_job`). So these objects must be defined before that call.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError

_first: dict[str, Any] = {}  # the script's names when it first started a job


def begins() -> None:
    """Remember the script's names, before it starts a job."""
    if not _first:
        _first.update(vars(sys.modules["__main__"]))


def name_of(thing: Any, what: str) -> str:
    """Return the dotted name of an object. Errors: `RunError` if other processes cannot import it."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(name, str)
        or not name.isidentifier()
        or not _is(module, name, thing)
    ):
        module, name = "__main__", _variable(thing)
    if name is None:
        raise RunError(
            "LS8260",
            f"{what}: other processes have to import it, but {_object_name(thing)} has no name at the top level of a "
            "file; define a function or variable at the top level of the script or a module, and pass that",
        )
    if module != "__main__":
        return f"{module}.{name}"
    path = f"{_script(what, name)}.{name}"
    if _first and _first.get(name) is not thing:
        raise RunError(
            "LS8261",
            f"{what}: {name} is defined after the script's first call that starts a job, where other "
            "processes stop reading it; define it before that call, or in a separate file",
        )
    return path


def _is(module: str, name: str, thing: Any) -> bool:
    return vars(sys.modules.get(module, object)).get(name) is thing if module in sys.modules else False


def _variable(thing: Any) -> str | None:
    """Return the name of the script's top-level variable that holds an object."""
    main_names: Mapping[str, Any] = vars(sys.modules["__main__"])
    return next((name for name, value in main_names.items() if value is thing and not name.startswith("__")), None)


def _script(what: str, name: str) -> str:
    """Return the module name of the running script. Errors: `RunError` in an interactive session, or if another module
    has the name."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        raise RunError(
            "LS8262",
            f"{what}: {name} is defined in this session, so other processes cannot import it; put it into a "
            f"file, my_file.py, and write from my_file import {name}",
        )
    stem = Path(file).stem
    spec = importlib.util.find_spec(stem) if stem.isidentifier() else None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        raise RunError(
            "LS8263",
            f"{what}: other processes cannot import {name} from {Path(file).name}, because `import {stem}` "
            f"{f'imports {spec.origin}' if spec is not None else 'does not import it'}; rename the script",
        )
    return stem


def _object_name(thing: Any) -> str:
    return f"{getattr(thing, '__qualname__', f'an object of {type(thing).__name__}')}"
