"""`lockstep replay`: a step of a run, computed again and looked at."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT")
    parser.add_argument("--step", type=int, required=True, help="as metrics.jsonl counts them, from 1")
    parser.add_argument("--processes", type=int, default=1, help="default 1")
    parser.add_argument("--strategy", help="default: single, or ddp with several processes; the run's own if not exact")
    parser.add_argument(
        "--from",
        dest="begin",
        type=int,
        metavar="STEP",
        help="begin at a checkpoint of at most this step; 0: the start",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example data.train=elsewhere.jsonl")


def main(known: argparse.Namespace) -> int:
    if known.processes < 1:
        raise RunError(f"--processes: {known.processes} is not a positive number")
    from lockstep.tools.replay import replay

    return replay(Path(known.output), known.step, known.overrides, known.strategy, known.processes, known.begin)
