"""`lockstep predict`: what an exported model makes of a text."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "what the exported model of OUTPUT makes of a text"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="TEXT",
        help="default: the lines of standard input; a tab between the texts of a pair",
    )
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="for example task.beams=4")


def main(known: argparse.Namespace) -> int:
    from lockstep.training.exported_model import predict

    return predict(Path(known.output), known.texts, known.set)
