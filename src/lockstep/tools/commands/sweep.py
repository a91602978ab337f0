"""`lockstep sweep`: several trials of a run, and one table of them."""

from __future__ import annotations

import argparse

from lockstep.config.run import QUICK_START
from lockstep.tools.commands import run_file
from lockstep.tools.sweep.sweep_file import read


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="key=value,value",
        help="try these values; with --search also key=low..high, or key=low..high:log",
    )
    parser.add_argument("--metric", help="sorts the table: accuracy, or -loss (less is better; the default)")
    parser.add_argument("--split", help="whose metric it is (default validation)")
    parser.add_argument("--parallel", type=int, metavar="N", help="trials at once (default 1)")
    parser.add_argument(
        "--no-share", dest="share", action="store_false", default=None, help="compute shared steps in every trial"
    )
    parser.add_argument("--search", type=int, metavar="TRIALS", help="let optuna choose so many trials")
    parser.add_argument("--out", help="folder of the trials; default: OUTPUT-sweep")
    parser.add_argument("--prepare", action="store_true", help="write every trial's run file and start none")


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.sweep.sweep import prepare, sweep

    path, words = run_file.split(known)
    names = ("over", "metric", "split", "parallel", "share", "search", "out")
    asked = read(path, QUICK_START, words, {name: getattr(known, name) for name in names})
    return prepare(asked) if known.prepare else sweep(asked)
