"""`lockstep logs`: what a run has said, wherever it was launched."""

from __future__ import annotations

import argparse
import collections

from lockstep.config.redaction import printable
from lockstep.config.run import RunError
from lockstep.tools.commands.status import NOT_WRITTEN, launcher_of, run_of, trust


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    trust(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run has ended")
    parser.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines")


def main(known: argparse.Namespace) -> int:
    run, record = run_of(known.output, known.trust)
    if record is None:
        raise RunError(f"{known.output}: {NOT_WRITTEN}")
    if known.tail is not None and known.tail < 0:
        raise RunError(f"--tail: {known.tail} is not a number of lines")
    launcher = launcher_of(record, known.trust)
    skip = 0
    if known.tail is not None:
        lines = collections.deque(enumerate(launcher.logs(run, record, False)), known.tail or 1)
        skip = lines[0][0] + (known.tail == 0) if lines else 0
    for place, line in enumerate(launcher.logs(run, record, known.follow)):
        if place >= skip:
            print(printable(line), flush=known.follow)
    return 0
