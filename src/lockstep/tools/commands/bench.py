"""`lockstep bench`: throughput and memory of a job over processes, strategies and micro-batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.config.run import QUICK_START, Run, RunError, load, overrides_of
from lockstep.tools.commands import run_file
from lockstep.tools.sweep import grid


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument(
        "--processes", type=int, nargs="+", metavar="N", help="default: 1, 2, 4, ... to the number of cores or GPUs"
    )
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="default: the run file's")
    parser.add_argument("--micro-batches", type=int, nargs="+", metavar="N", help="default: the run file's")
    parser.add_argument(
        "--over", action="append", default=[], metavar="key=value,value", help="vary any other key of the run file"
    )
    parser.add_argument("--weak", action="store_true", help="batch_size and micro_batches grow with the processes")
    parser.add_argument("--steps", type=int, default=10, help="timed steps a job (default 10)")
    parser.add_argument("--skip", type=int, default=3, help="steps before them that do not count (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each job runs, in turns (default 3)")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine's rates instead, for `plan --simulate --device`"
    )
    parser.add_argument("--out", help="folder of the results; default: OUTPUT-bench")


def main(known: argparse.Namespace) -> int:
    from lockstep.tools.bench.bench import Bench, bench

    path, words = run_file.split(known)
    overrides = overrides_of(words)
    base = load(path, overrides, QUICK_START)
    for name in ("steps", "rounds"):
        if getattr(known, name) < 1:
            raise RunError(f"--{name}: {getattr(known, name)} is not a positive number")
    if known.skip < 0:
        raise RunError(f"--skip: {known.skip} is not a number of steps")
    if known.calibrate:
        return calibrated(base, known)
    over = {}
    if known.strategies:
        over["strategy.name"] = known.strategies
    if known.micro_batches:
        over["micro_batches"] = known.micro_batches
    over |= grid.parse(known.over)
    processes = known.processes or upwards(base)
    if min(processes) < 1:
        raise RunError(f"--processes: {min(processes)} is not a positive number")
    folder = Path(known.out or f"{base.folder}-bench")
    asked = Bench(base, over, sorted(set(processes)), known.steps, known.skip, known.rounds, known.weak, folder)
    return bench(asked, path, overrides, QUICK_START)


def calibrated(run: Run, known: argparse.Namespace) -> int:
    """Write down what the machine can do. Errors: `RunError`."""
    from lockstep.launchers.start import joining
    from lockstep.tools.bench.calibrate import calibrate
    from lockstep.track.console import Console

    for name in ("strategies", "micro_batches", "over", "weak"):
        if getattr(known, name):
            raise RunError(f"--{name.replace('_', '-')}: --calibrate measures one run; set its keys instead")
    if joining():
        raise RunError("bench starts the processes of each job itself: call it outside of torchrun and srun")
    processes = known.processes or upwards(run)
    if min(processes) < 1:
        raise RunError(f"--processes: {min(processes)} is not a positive number")
    folder, console = Path(known.out or f"{run.folder}-calibration"), Console(True)
    device = calibrate(run, processes, known.steps, known.rounds, folder, console.say)
    console.facts(
        {
            "device": device.name,
            "crowding": ", ".join(f"{n} at once: {factor:.2f}" for n, factor in device.crowding.items()),
            "file": str(folder / "device.yaml"),
        }
    )
    return 0


def upwards(run: Run) -> list[int]:
    """1, 2, 4, ... and the number of processes that `launch.processes: auto` gives."""
    from lockstep.launchers.local import processes_of

    most = processes_of(run.model_copy(update={"launch": run.launch.model_copy(update={"processes": "auto"})}))
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
