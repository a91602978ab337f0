"""Generate the site's page reference/options.md: every command and its options.

In: the argument parsers of `lockstep.commands`, which import without torch. Out: `page()`, its text, which
docs/site.py writes.
"""

from __future__ import annotations

import argparse
import importlib
import re

from lockstep import commands

HEAD = """# Options of every command

`lockstep COMMAND --help` prints the same. Purpose of each command, exit statuses and contents of OUTPUT:
[commands](commands.md). After `RUN.yaml`, keys of the run file may follow as `key=value` or `--key value`.
"""


# Self-explanatory in `--help`.
KNOWN = {
    "OUTPUT": "the output folder of a run",
    "OUTPUT[/checkpoints/step-N]": "the output folder of a run, or one of its checkpoints",
    "USER/REPO": "the repository, which is made if it is not there",
}


def page() -> str:
    """Text of the page."""
    parts = [HEAD]
    for purpose, members in commands.PURPOSES.items():
        parts.append(f"## {purpose}\n")
        parts += [_command(name, command.text) for name, command in members.items()]
    return "\n".join(parts)


def _command(name: str, text: str) -> str:
    module = importlib.import_module(f"lockstep.commands.{commands.file_of(name)}")
    parser = argparse.ArgumentParser(prog=f"lockstep {name}")
    getattr(module, f"{name}_arguments")(parser)
    rows = [_row(action) for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    table = ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"### `lockstep {name}`\n", f"{text[0].upper()}{text[1:]}.\n", *table])


def _row(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ", ".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    names = list(action.option_strings) or [str(value)]
    if action.option_strings and action.nargs != 0:
        names[-1] += f" {value}" + (" ..." if action.nargs in ("+", "*") else "")
    said = re.sub(r"\s+", " ", (action.help or KNOWN.get(str(value), "")).replace("%%", "%"))
    said = said.replace("%(default)s", str(action.default))
    return f"| {', '.join(f'`{_safe(name)}`' for name in names)} | {_safe(said)} |"


def _safe(text: str) -> str:
    return text.replace("|", "\\|")
