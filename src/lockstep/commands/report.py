"""`lockstep report`: the page of a run, written again."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.report import write_report
from lockstep.run import RunError

HELP = "write OUTPUT/report.html again"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="+")


def main(known: argparse.Namespace) -> int:
    for output in known.output:
        try:
            print(write_report(Path(output)))
        except (OSError, ValueError) as error:
            raise RunError(f"{output} is not the output folder of a run: {error}") from None
    return 0
