"""`lockstep list`: what a run file can name."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lockstep.config import plugins
from lockstep.config.disclosure import one_line
from lockstep.track.console import Console

HELP = "tasks, strategies, launchers and trackers a run file can name"


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def main(known: argparse.Namespace) -> int:
    console = Console(True)
    rows = []
    for name in plugins.names("strategies"):
        try:
            strategy: Any = plugins.find("strategies", name)
        except Exception as caught:  # an engine that lacks what this package knows of it takes no other down
            rows.append([name, "", "", f"no: cannot be loaded: {one_line(caught, 200)}"])
            continue
        summary = (sys.modules[strategy.__module__].__doc__ or "").strip().partition("\n")[0]
        lacking = strategy.lacking()
        rows.append(
            [
                name,
                summary,
                "same bits" if strategy.exact else "rounding",
                "yes" if not lacking else f"no: pip install 'lockstep-train[{lacking[0]}]'",
            ]
        )
    console.table("strategies", ["name", "what it is", "against single", "runs here"], rows)
    for kind in ("tasks", "launchers", "track"):
        console.facts({kind: ", ".join(plugins.names(kind))})
    return 0
