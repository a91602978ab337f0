"""`lockstep train`: train a run file to its end, or go on with it."""

from __future__ import annotations

import argparse

from lockstep import start
from lockstep.commands import run_file

HELP = "train a run file to its end, or go on with it; without one, the built-in quick start"
arguments = run_file.arguments


def main(known: argparse.Namespace) -> int:
    return start.train(run_file.run_of(known))
