"""`lockstep diff`: where two runs part, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the first step at which two runs part, and the first thing in it that differs"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="OUTPUT of a run")
    parser.add_argument("b", metavar="B", help="OUTPUT of another")
    parser.add_argument("--quick", action="store_true", help="compare what is written down, and compute nothing again")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of both, such as data.train=elsewhere.jsonl")


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.diff import diff

    return diff(Path(known.a), Path(known.b), known.overrides, look=not known.quick)
