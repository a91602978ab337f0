"""A name in the run file -> the one class in that file.

In: a kind (`tasks`, `strategies`, `optimizers`, `launchers`, `track`) and a name, or a dotted path to a class of yours.
Out: the class. A new plug-in is one new file in the kind's folder; nothing is registered anywhere. A plug-in is a
public class that inherits `plugin` from the interface (`tasks/task.py`, ...). A class that sets `plugin` itself is a
base of others. Names are read from the files' text, since importing them takes seconds.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.config.errors import InvalidValue, RunError

_FILES = {"ray": "ray_train"}  # a name whose file is called otherwise: no file has the name of the package it imports
_SINGULAR = {"tasks": "task", "strategies": "strategy", "launchers": "launcher", "track": "tracker"}
_SINGULAR |= {"optimizers": "optimizer"}
_FOLDERS = {"optimizers": "strategies.optimizers"}  # kinds whose folder is inside of another one


@contextmanager
def importing() -> Iterator[None]:
    """For imports of torch and transformers: thousands of modules are made and none is garbage, but looking for it
    takes a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class PluginError(InvalidValue):
    """A name that no plug-in has, or a module that does not hold exactly one."""


def names(kind: str) -> list[str]:
    """All names of a kind that a run file can use, in alphabetical order."""
    package = importlib.import_module(f"lockstep.{_FOLDERS.get(kind, kind)}")
    return list(_names(package, tuple(os.stat(folder).st_mtime_ns for folder in package.__path__)))


@lru_cache(maxsize=16)
def _names(package: ModuleType, changed: tuple[int, ...]) -> list[str]:
    """`changed`: when its folders were: what is put there later is found, too."""
    names_of = {file: name for name, file in _FILES.items()}
    interface = _SINGULAR[package.__name__.rpartition(".")[2]].capitalize()
    files = [file for folder in package.__path__ for file in Path(folder).glob("*.py")]
    plugins = [file.stem for file in files if any(_inherits(file, name, interface) for name in _classes(file))]
    return sorted(names_of.get(file, file) for file in plugins)


@lru_cache(maxsize=512)
def _classes(file: Path) -> dict[str, tuple[list[str], bool]]:
    """The public classes in a file that have bases: the bases' names, and whether the class sets `plugin` itself."""
    text = file.read_text(encoding="utf-8")
    heads = list(re.finditer(r"^class ([A-Za-z]\w*)\(([^)]*)\):$", text, re.MULTILINE))
    ends = [*(head.start() for head in heads[1:]), len(text)][: len(heads)]
    return {
        head[1]: (re.findall(r"\w+", head[2]), bool(re.search(r"^    plugin\b", text[head.end() : end], re.MULTILINE)))
        for head, end in zip(heads, ends, strict=True)
    }


def _inherits(file: Path, name: str, interface: str, as_base: bool = False) -> bool:
    """Whether a class of a file descends from an interface; as a plug-in, unless `as_base`."""
    bases, sets_plugin = _classes(file).get(name, ([], False))
    if sets_plugin and not as_base:
        return False
    return any(base == interface or _inherits(_home(file, base), base, interface, True) for base in bases)


def _home(file: Path, name: str) -> Path:
    """The file that a name comes from: the file itself, or that of the module of lockstep that it is imported from."""
    text = file.read_text(encoding="utf-8")
    found = re.search(rf"^from lockstep\.([\w.]+) import (?:\([^)]*\b{name}\b|[^\n(]*\b{name}\b)", text, re.MULTILINE)
    return file if found is None else Path(__file__).parents[1] / f"{found[1].replace('.', '/')}.py"


def find(kind: str, name: str) -> type:
    """The class behind `name`.

    `name` is a file of `lockstep/KIND/` or the dotted path of a class in a module of yours (`package.module.Class`).
    Errors: `PluginError`, naming the nearest known name. The module is imported, and with it the engine it needs.
    """
    if "." in name:
        found = attribute(name)
        if kind == "optimizers" and getattr(found, "plugin", "") != kind:
            raise PluginError(
                "LS1090", f"{name} is no optimizer of lockstep's; CONTRIBUTING.md has how torch's are made one"
            )
        return found
    known = names(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PluginError("LS1091", f"unknown {_SINGULAR[kind]} {name!r}: {hint}known are {', '.join(known)}")
    with importing():
        module = importlib.import_module(f"lockstep.{_FOLDERS.get(kind, kind)}.{_FILES.get(name, name)}")
    classes = [
        c
        for c in vars(module).values()
        if inspect.isclass(c)
        and c.__module__ == module.__name__
        and not c.__name__.startswith("_")
        and getattr(c, "plugin", "") == kind
        and "plugin" not in vars(c)
    ]
    if len(classes) != 1:
        raise PluginError(
            "LS1092", f"lockstep/{kind}/{name}.py must hold exactly one plug-in class, it holds {len(classes)}"
        )
    return classes[0]


def lacking(packages: Sequence[str]) -> list[str]:
    """Those of some packages that are not installed. Nothing is imported."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def require(packages: Sequence[str], key: str, extra: str = "") -> None:
    """Refuse a plug-in whose packages are not installed. `key`: of the run file, and its value, which need them.
    `extra`: what installs them; by default it is named as the package. Errors: `RunError`."""
    for package in lacking(packages):
        raise RunError(
            "LS1093", f"{key} needs {package}, which is not installed: pip install 'lockstep-train[{extra or package}]'"
        )


def refuse_old(packages: Sequence[str], distribution: str = "lockstep-train") -> None:
    """Refuse packages that are installed in a version below what lockstep was tried with: pip would not have taken it.
    The least version is that of the `distribution`'s own metadata. Errors: `RunError`."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires(distribution) or ()]
    except importlib.metadata.PackageNotFoundError:  # lockstep is on a path of its own
        return
    for package in packages:
        try:
            installed = Version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
        for least in (bound for each in wanted if each.name == package for bound in each.specifier):
            if least.operator == ">=" and installed < Version(least.version):
                raise RunError(
                    "LS1094",
                    f"{package} {installed} is older than lockstep was tried with: pip install '{package}{least}' "
                    "(docs/explanation/engines.md says what earlier versions do)",
                )


# -- what is the user's own ------------------------------------------------------------------------------------------


class Reached(BaseException):
    """Ends the import of a user's script at the first job that it would start: what stands before it is there."""


_MARK = "__lockstep_imports__"  # set in a module of the user's while its top is being run


def starts_a_job() -> None:
    """To be called by everything in lockstep's Python interface that starts a job. Errors: `Reached`, inside of a job
    that imports the script again in which the call stands."""
    if any(_MARK in vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType)):
        raise Reached


def attribute(name: str) -> Any:
    """What a dotted path (`package.module.thing`) names. Its module is imported; of a script only what stands before
    its first call that starts a job, so that a script needs no `__main__` guard. Errors: `PluginError`."""
    module_name, _, last = name.rpartition(".")
    if os.getcwd() not in sys.path:  # a module of yours beside the run file, as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(_imported(module_name), last)
    except (ImportError, AttributeError) as error:
        raise PluginError("LS1095", f"cannot import {name!r}: {error}") from error


def _imported(name: str) -> ModuleType:
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.origin is None or spec.submodule_search_locations is not None:
        return importlib.import_module(name)
    main = sys.modules["__main__"]
    if (file := getattr(main, "__file__", None)) and Path(file).resolve() == Path(spec.origin).resolve():
        return main  # the script that is running here
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    try:
        spec.loader.exec_module(module)
    except Reached:
        pass
    except SystemExit as ended:
        del sys.modules[name]
        raise ImportError(f"{Path(spec.origin).name} ends the program while it is imported (sys.exit)") from ended
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        delattr(module, _MARK)
    if (package := sys.modules.get(spec.parent or "")) is not None:
        setattr(package, name.rpartition(".")[2], module)
    return module
