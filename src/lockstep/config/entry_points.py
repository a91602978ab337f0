"""Plug-ins of installed distributions, discovered by their entry points.

In: a kind of plug-in, which has a group of entry points (`lockstep.tasks`, ..., `lockstep.commands`), and a name. Out:
entry points, and the objects they name. Listing reads metadata and source text only; it imports nothing.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from lockstep.config.errors import InvalidValue

GROUPS = {
    "tasks": "lockstep.tasks",
    "strategies": "lockstep.strategies",
    "optimizers": "lockstep.optimizers",
    "launchers": "lockstep.launchers",
    "track": "lockstep.trackers",
    "commands": "lockstep.commands",
}
# Plug-ins and options of this repository's distributions: kind -> name -> extra, so that a message can name what to
# install. The distribution is lockstep-EXTRA. For an option, the kind is the command: `lockstep plan`.
EXTRAS: dict[str, dict[str, str]] = {
    "launchers": dict.fromkeys(("kubernetes", "ray", "sagemaker"), "clouds"),
    "lockstep plan": dict.fromkeys(("--simulate", "--suggest", "--processes", "--device", "--price", "--out"), "plan"),
    "lockstep bench": {"--calibrate": "plan"},
}


class PluginError(InvalidValue):
    """An unknown plug-in name, or a module that does not define exactly one plug-in."""


def named(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind: name -> entries, in alphabetical order. A name has several entries if several
    distributions register it."""
    entries: dict[str, list[EntryPoint]] = {}
    for entry in _by_group(tuple(sys.path))[GROUPS[kind]]:
        entries.setdefault(entry.name, []).append(entry)
    # `origin` parses the metadata of a distribution: for the few names that have several entries
    return {name: each if len(each) == 1 else sorted(each, key=origin) for name, each in sorted(entries.items())}


@lru_cache(maxsize=64)
def _by_group(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return group -> entry points. `path`: `sys.path`; the first of distributions with the same name counts."""
    owners = dict.fromkeys(name for place in path for name in _owners(os.path.abspath(place)))
    every = [entry for name in owners for entry in importlib.metadata.distribution(name).entry_points]
    return {group: tuple(entry for entry in every if entry.group == group) for group in GROUPS.values()}


@lru_cache(maxsize=512)
def _owners(place: str) -> tuple[str, ...]:
    """Return the distributions in one folder that declare lockstep plug-ins. Reading 200 distributions takes
    milliseconds, so the result is cached per folder: a forked process has another folder in front of its path."""
    installed = importlib.metadata.distributions(path=[place])
    declaring = [each for each in installed if "[lockstep." in (each.read_text("entry_points.txt") or "")]
    return tuple(each.name for each in declaring if each.name)  # `name` parses the metadata


def one(kind: str, name: str, called: str) -> EntryPoint | None:
    """Return the entry point with this name, or None. `called`: the kind's name in messages. Errors: `PluginError` if
    several distributions register it."""
    entries = named(kind).get(name, [])
    if len(entries) > 1:
        owners = " and ".join(map(origin, entries))
        raise PluginError("LS1140", f"{called} {name!r} is registered by {owners}; uninstall all but one of them")
    return entries[0] if entries else None


def load(entry: EntryPoint, called: str) -> Any:
    """Import the object of an entry point. Errors: `PluginError`, which names the distribution."""
    try:
        return entry.load()
    except Exception as error:  # third-party code may raise anything during import
        remedy = f"; install {entry.dist.name} again, or remove it" if entry.dist is not None else ""
        text = f"{called} {entry.name!r} of {origin(entry)} cannot be loaded: {error}{remedy}"
        raise PluginError("LS1141", text) from error


def origin(entry: EntryPoint) -> str:
    """Return the distribution of an entry point and its version: `lockstep-clouds 0.1.0`."""
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def summary(entry: EntryPoint) -> str:
    """Return the first line of the docstring of an entry point's module, or an empty text."""
    file = file_of(entry.module)
    if file is None:
        return ""
    try:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    except (OSError, SyntaxError, ValueError):
        return ""
    return text.partition("\n")[0]


def file_of(module: str) -> Path | None:
    """Return the source file of a module, or None."""
    spec = spec_of(module)
    return None if spec is None or spec.origin is None or not spec.has_location else Path(spec.origin)


def spec_of(module: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parent packages, as `importlib.util.find_spec` would."""
    package, _, _ = module.rpartition(".")
    path = None
    if package:
        outer = spec_of(package)
        if outer is None or outer.submodule_search_locations is None:
            return None
        path = list(outer.submodule_search_locations)
    try:
        for finder in sys.meta_path:
            if (spec := finder.find_spec(module, path)) is not None:
                return spec
    except KeyError:  # a nested namespace package: Python requires the outer package to be imported
        spec = ModuleSpec(module, None, is_package=True)
        spec.submodule_search_locations = [str(Path(p) / module.rpartition(".")[2]) for p in path or ()]
        return spec
    return None


def missing(kind: str, name: str) -> str | None:
    """Return what to install for an unknown plug-in or option, or None if no distribution of this repository has it."""
    extra = EXTRAS.get(kind, {}).get(name)
    return None if extra is None else f'lockstep-{extra}: pip install "lockstep-train[{extra}]"'
