"""`lockstep branch`: a run that begins with the first steps of another one."""

from __future__ import annotations

import argparse

from lockstep.distributed.signals import say_what_ended
from lockstep.tools.commands import run_file


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("begins_with", metavar="OUTPUT@N", help="a run, and how many of its steps")
    run_file.arguments(parser)


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.branch import branch

    say_what_ended()
    return branch(known.begins_with, run_file.run_of(known))
