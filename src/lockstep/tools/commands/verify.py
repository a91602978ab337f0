"""`lockstep verify`: is this the same training as on one process?"""

from __future__ import annotations

import argparse

from lockstep.config.run import RunError
from lockstep.tools.commands import run_file

HELP = "compare a few steps of a run with the same steps as one process"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps to compare (default 5)")


def main(known: argparse.Namespace) -> int:
    if known.steps < 1:
        raise RunError(f"--steps: {known.steps} is not a positive number of steps")
    from lockstep.tools.verify import verify

    return verify(run_file.run_of(known), known.steps)
