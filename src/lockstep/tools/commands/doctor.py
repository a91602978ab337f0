"""`lockstep doctor`: what this machine can run, and what lies between processes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lockstep.config import plugins
from lockstep.config.run import RunError

PAGE = "lockstep-selftest.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", help="where checkpoints would go; its speed is measured (default: .)")
    parser.add_argument("--processes", type=int, help="start so many on this machine, and measure between them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the processes")
    parser.add_argument(
        "--selftest", action="store_true", help="run every strategy on this machine, and compare with one process"
    )
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="of --selftest (default: all that there are)")
    parser.add_argument("--page", help=f"what --selftest writes (default: {PAGE})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # of the processes that --processes starts


def main(known: argparse.Namespace) -> int:

    if known.processes is not None and known.processes < 1:
        raise RunError(f"--processes: {known.processes} is not a positive number of processes")
    if known.selftest:
        from lockstep.tools.doctor.selftest import selftest

        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise RunError("--selftest: starts its processes itself: call it without torchrun")
        names = known.strategies or plugins.names("strategies")
        return selftest(names, known.processes, known.device, Path(known.page or PAGE), known.json)
    for option in ("page", "strategies"):
        if getattr(known, option):
            raise RunError(f"--{option}: belongs to --selftest, which is not asked for")
    from lockstep.tools.doctor.doctor import doctor, into

    if known.into is not None:
        return into(Path(known.into), Path(known.folder), known.device)
    return doctor(Path(known.folder), known.processes, known.json, known.device)
