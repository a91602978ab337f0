"""`lockstep push`: upload an export to the Hub."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.track.console import Console, error


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("repository", metavar="USER/REPO")
    parser.add_argument("--public", action="store_true", help="create the repository public; default: private")


def main(known: argparse.Namespace) -> int:
    from lockstep.checkpoint.export import PushFailed, push

    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", known.repository):
        raise RunError(f"{known.repository!r} is not a repository of the Hub: wanted is USER/REPO")
    say = Console(True).say
    try:
        pushed = push(Path(known.output), known.repository, not known.public, say)
    except PushFailed as failed:
        error(str(failed))
        return 1
    say(f"pushed to {pushed.address}, commit {pushed.commit[:12]}")
    return 0
