"""`lockstep doctor`: what this machine can run, and what lies between processes."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import RunError

HELP = "what this machine can run; with --processes or under a launcher, what lies between the processes"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", help="where checkpoints would go; its speed is measured (default: .)")
    parser.add_argument("--processes", type=int, help="start so many on this machine, and measure between them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the processes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # of the processes that --processes starts


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.doctor.doctor import doctor, into

    if known.processes is not None and known.processes < 1:
        raise RunError(f"--processes: {known.processes} is not a positive number of processes")
    if known.into is not None:
        return into(Path(known.into), Path(known.folder), known.device)
    return doctor(Path(known.folder), known.processes, known.json, known.device)
