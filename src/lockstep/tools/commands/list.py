"""`lockstep list`: what a run file can name."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lockstep.config import plugins
from lockstep.config.redaction import one_line
from lockstep.config.run import RunError
from lockstep.track.console import Console

# kind of plug-in -> the key of the run file that names one
_KEYS = {"tasks": "task.name", "strategies": "strategy.name", "optimizers": "optim.name"}
_KEYS |= {"launchers": "launch.name", "track": "track.to"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def main(known: argparse.Namespace) -> int:
    console = Console(True)
    for kind, key in _KEYS.items():
        console.columns(f"{kind if kind != 'track' else 'trackers'} ({key})", rows_of(kind), cut=True)
    return 0


def rows_of(kind: str) -> list[list[str]]:
    """A row for each plug-in: its name and what it is; of a strategy also what it is beside one process (the same bits,
    or equal to rounding), of these, trackers and optimizers whether what it needs is installed."""
    rows = []
    for name in plugins.names(kind):
        try:
            plugin: Any = plugins.find(kind, name)
            lacking = _lacking(kind, plugin)
        except Exception as caught:  # an engine that lacks what this package knows of it takes no other down
            unknown = {"strategies": ["", "broken"], "optimizers": ["broken"], "track": ["broken"]}.get(kind, [])
            rows.append([name, *unknown, f"cannot be loaded: {one_line(caught, 200)}"])
            continue
        summary = (sys.modules[plugin.__module__].__doc__ or "").strip().partition("\n")[0]
        told = ["same bits" if plugin.exact else "rounding"] if kind == "strategies" else []
        told += ["lacking" if lacking else "ready"] if kind in ("strategies", "optimizers", "track") else []
        rows.append([name, *told, f"{lacking}; {summary}" if lacking else summary])
    return rows


def _lacking(kind: str, plugin: Any) -> str:
    """The command that installs what is missing; empty where nothing is, or for kinds that import nothing further."""
    if kind == "strategies" and (missing := plugins.lacking(plugin.needs)):
        return f"pip install 'lockstep-train[{missing[0]}]'"
    if kind in ("optimizers", "track"):
        try:
            plugins.require(plugin.packages, "optim.name", plugin.extra) if kind == "optimizers" else plugin.check()
        except RunError as caught:
            return str(caught).rpartition(": ")[2]
    return ""
