"""Plug-ins of installed distributions, found by the entry points that these declare.

In: a kind of plug-in, which has a group of entry points (`lockstep.tasks`, ..., `lockstep.commands`), and a name. Out:
entry points, and what is behind one. Listing reads metadata and the text of files; it imports nothing.
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
# What the distributions of this repository bring, so that a message can say what installs it: kind -> name -> extra.
# The distribution is called lockstep-EXTRA. Of options the kind is the command: `lockstep plan`.
EXTRAS: dict[str, dict[str, str]] = {
    "launchers": dict.fromkeys(("kubernetes", "ray", "sagemaker"), "clouds"),
    "lockstep plan": dict.fromkeys(("--simulate", "--suggest", "--processes", "--device", "--price", "--out"), "plan"),
    "lockstep bench": {"--calibrate": "plan"},
}


class PluginError(InvalidValue):
    """A name that no plug-in has, or a module that does not hold exactly one."""


def named(kind: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a kind by name, in alphabetical order. More than one of a name: several distributions have
    it."""
    entries: dict[str, list[EntryPoint]] = {}
    for entry in _by_group(tuple(sys.path))[GROUPS[kind]]:
        entries.setdefault(entry.name, []).append(entry)
    return {name: sorted(entries[name], key=origin) for name in sorted(entries)}


@lru_cache(maxsize=64)
def _by_group(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """`path`: where Python looks for distributions now; of those of one name the first counts."""
    owners = dict.fromkeys(name for place in path for name in _owners(os.path.abspath(place)))
    every = [entry for name in owners for entry in importlib.metadata.distribution(name).entry_points]
    return {group: tuple(entry for entry in every if entry.group == group) for group in GROUPS.values()}


@lru_cache(maxsize=512)
def _owners(place: str) -> tuple[str, ...]:
    """The distributions of one place that declare plug-ins of lockstep's. Milliseconds for two hundred of them, so a
    forked process, whose path has another folder in front, knows those of the other places."""
    installed = importlib.metadata.distributions(path=[place])
    declaring = [each for each in installed if "[lockstep." in (each.read_text("entry_points.txt") or "")]
    return tuple(each.name for each in declaring if each.name)  # the name is read from a page of text


def one(kind: str, name: str, called: str) -> EntryPoint | None:
    """The entry point of this name; None: there is none. `called`: what a plug-in of this kind is called in a message.
    Errors: `PluginError` where several distributions have one."""
    entries = named(kind).get(name, [])
    if len(entries) > 1:
        owners = " and ".join(map(origin, entries))
        raise PluginError("LS1140", f"{called} {name!r} is registered by {owners}; uninstall all but one of them")
    return entries[0] if entries else None


def load(entry: EntryPoint, called: str) -> Any:
    """What an entry point names; its module is imported. Errors: `PluginError`, which names the distribution."""
    try:
        return entry.load()
    except Exception as error:  # whatever the code of others raises while it is imported
        remedy = f"; install {entry.dist.name} again, or remove it" if entry.dist is not None else ""
        text = f"{called} {entry.name!r} of {origin(entry)} cannot be loaded: {error}{remedy}"
        raise PluginError("LS1141", text) from error


def origin(entry: EntryPoint) -> str:
    """The distribution of an entry point and its version: `lockstep-clouds 0.1.0`."""
    return "an unknown distribution" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def summary(entry: EntryPoint) -> str:
    """The first line of the docstring of an entry point's module; empty where there is none."""
    file = file_of(entry.module)
    if file is None:
        return ""
    try:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    except (OSError, SyntaxError, ValueError):
        return ""
    return text.partition("\n")[0]


def file_of(module: str) -> Path | None:
    """The source file of a module; None: there is none."""
    spec = spec_of(module)
    return None if spec is None or spec.origin is None or not spec.has_location else Path(spec.origin)


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is, by Python's own finders. `importlib.util.find_spec` would import the packages it is in."""
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
    except KeyError:  # a folder without __init__.py in another one: Python wants the outer one to be imported
        spec = ModuleSpec(module, None, is_package=True)
        spec.submodule_search_locations = [str(Path(p) / module.rpartition(".")[2]) for p in path or ()]
        return spec
    return None


def missing(kind: str, name: str) -> str | None:
    """What installs a plug-in or option that nothing here has, if a distribution of this repository has it."""
    extra = EXTRAS.get(kind, {}).get(name)
    return None if extra is None else f'lockstep-{extra}: pip install "lockstep-train[{extra}]"'
