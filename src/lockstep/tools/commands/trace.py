"""`lockstep trace`: run any command, and write down what its training does."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "lockstep trace [-o DIR] [--every N] [--steps N] [--level LEVEL] -- COMMAND ..."
    parser.add_argument("-o", "--output", metavar="DIR", default="lockstep-trace", help="folder of the trace")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="measure tensors at each N-th step (default 1)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="record the first N steps; the command goes on")
    levels = ("losses", "gradients", "modules")
    parser.add_argument("--level", choices=levels, default="gradients", help="what is measured (default gradients)")
    parser.add_argument(
        "--perturb", action="store_true", help="flip last bits of the weights first: how far apart rounding is"
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run, behind --")


def main(known: argparse.Namespace) -> int:
    command = known.command_line[1:] if known.command_line[:1] == ["--"] else known.command_line
    if not command:
        raise RunError("lockstep trace: no command; write it behind --, as in `lockstep trace -o a -- python train.py`")
    for name in ("every", "steps"):
        value = getattr(known, name)
        if value is not None and value < 1:
            raise RunError(f"--{name}: {value} is not a positive number of steps")
    from lockstep.tools.traces import record

    options = {"every": known.every, "steps": known.steps, "level": known.level, "perturb": known.perturb}
    return record(command, Path(known.output), options)
