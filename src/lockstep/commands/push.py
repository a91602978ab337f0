"""`lockstep push`: upload an export to the Hub."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "upload OUTPUT/export to the Hub (token from HF_TOKEN)"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    parser.add_argument("repository", metavar="USER/REPO")
    parser.add_argument("--public", action="store_true", help="create the repository public")


def main(known: argparse.Namespace) -> int:
    from lockstep.hub import publish

    print(publish(Path(known.output) / "export", known.repository, not known.public))
    return 0
