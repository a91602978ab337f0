"""`lockstep report`: the page of a run, written again; of several runs also one that shows them side by side."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lockstep.config.run import RunError

HELP = "write OUTPUT/report.html again; of several OUTPUTs also one page that compares them"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", nargs="+", metavar="OUTPUT", help="output folder of a run, at any stage")
    parser.add_argument(
        "--to", metavar="FILE.html", help="where the comparison goes; default: comparison.html beside the folders"
    )


def main(known: argparse.Namespace) -> int:
    from lockstep.track.report.report import write_comparison, write_report

    folders = [Path(output) for output in known.output]
    if known.to is not None and len(folders) == 1:
        raise RunError("--to: a comparison needs two output folders or more")
    for folder in folders:
        try:
            print(write_report(folder))
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} is not the output folder of a run, or cannot be written to: {error}") from None
    if len(folders) > 1:
        beside = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
        path = Path(known.to) if known.to is not None else beside / "comparison.html"
        try:
            print(write_comparison(folders, path))
        except (OSError, ValueError) as error:
            raise RunError(f"the comparison of {len(folders)} runs could not be written: {error}") from None
    return 0
