"""`lockstep verify`: is this the same training as on one process?"""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.tools.commands import run_file

HELP = "compare a few steps of a run with the same steps as one process"


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="steps to compare (default 5)")
    plain = parser.add_mutually_exclusive_group()
    plain.add_argument("--plain", action="store_true", help="compare with the plain reference, and with nothing else")
    plain.add_argument("--no-plain", action="store_true", help="compare with one process, and not with the reference")
    golden = parser.add_mutually_exclusive_group()
    golden.add_argument("--write", metavar="FILE", help="write down hashes of these steps instead of comparing them")
    golden.add_argument("--against", metavar="FILE", help="compare with hashes that --write has written")


def main(known: argparse.Namespace) -> int:
    if known.steps < 1:
        raise RunError(f"--steps: {known.steps} is not a positive number of steps")
    run = run_file.run_of(known)
    if known.write or known.against:
        from lockstep.tools import golden

        return (
            golden.write(run, known.steps, Path(known.write))
            if known.write
            else golden.against(run, Path(known.against))
        )
    from lockstep.tools.verify import verify

    return verify(run, known.steps, plain=not known.no_plain, single=not known.plain)
