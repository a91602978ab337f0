"""`lockstep --completion SHELL`: print a completion script for commands, options and paths, for bash, zsh or fish.

In: the parsers of all commands. Out: a script on standard output, by shtab. The script contains all completions, so Tab
starts no Python (argcomplete would start one each time).
"""

from __future__ import annotations

import argparse
from typing import Any

from lockstep import commands
from lockstep.config import plugins
from lockstep.config.errors import RunError

SHELLS = ("bash", "zsh", "fish")
# metavar -> kind of path
FILES = ("RUN.yaml", "RUN.yaml | SWEEP.yaml", "FILE", "FILE.html", "TEXT|FILE")
FOLDERS = ("OUTPUT", "OUTPUT[/checkpoints/step-N]", "OUTPUT@N", "DIR", "FOLDER", "A", "B")


class Completed(argparse.ArgumentParser):
    """A parser that marks path arguments for shtab."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        import shtab

        action: Any = super().add_argument(*names, **options)
        if action.metavar in FILES:
            action.complete = shtab.FILE
        elif action.metavar in FOLDERS or action.dest in ("output", "folder"):
            action.complete = shtab.DIRECTORY
        return action


def parser() -> argparse.ArgumentParser:
    """Combine all commands into one parser. Errors: `RunError` if a command of another distribution cannot be
    imported."""
    whole = Completed(prog="lockstep", description="Train transformers.")
    whole.add_argument("--version", action="store_true", help="print the version")
    whole.add_argument("--completion", choices=SHELLS, help="print a completion script")
    parts = whole.add_subparsers(parser_class=Completed)
    for name in commands.names():
        part = parts.add_parser(name, help=commands.description(name), description=commands.description(name))
        for module in reversed(commands.modules_of(name)):
            getattr(module, f"{name.replace('-', '_')}_arguments")(part)
    return whole


def run_completion(words: list[str]) -> int:
    """Print the script for a shell. Errors: `RunError`."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise RunError(
            "LS8430",
            f"--completion: {' '.join(words) or 'nothing'} is not a supported shell; expected one of "
            f"{', '.join(SHELLS)}",
        )
    plugins.require(["shtab"], "--completion", "completion")
    import shtab

    print(shtab.complete(parser(), shell=words[0]))
    return 0
