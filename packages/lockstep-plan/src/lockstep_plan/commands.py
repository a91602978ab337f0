"""Options that this distribution adds to commands: `lockstep plan --simulate` and `--suggest`, `lockstep bench
--calibrate`.

In: the parser of a command, then its parsed command line. Out: an exit status; None if none of these options was given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep import commands
from lockstep.commands import before_a_run
from lockstep.config.run import RunError
from lockstep.track.console import Console


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate", action="store_true", help="simulate memory, messages and time without the machines"
    )
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of processes to simulate, one plan each; default: the run file's",
    )
    parser.add_argument("--device", default="h100", help="h100, a100, or a YAML file of rates (default h100)")
    parser.add_argument(
        "--suggest", action="store_true", help="simulate strategies and numbers of micro-batches, and rank them"
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of one device-hour")
    parser.add_argument("--out", metavar="FILE", help="also write a page, FILE.html")


def run_plan(args: argparse.Namespace) -> int | None:
    if not args.simulate and not args.suggest:
        for name in ("processes", "price", "out"):
            if getattr(args, name) is not None:
                text = f"--{name}: has an effect only with --simulate; for this plan set launch.processes"
                raise RunError("LS8081", text)
        return None
    if args.offline:
        raise RunError("LS8080", "--offline: has an effect only without --simulate and --suggest; remove it")
    from lockstep.launchers import start
    from lockstep_plan.options import answered

    run = start.continued_as_new_run(commands.run_of(args), Console(True).say)
    return answered(run, args.processes, args.device, args.suggest, args.price, args.out)


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine's rates instead, for `plan --simulate --device`"
    )


def run_bench(args: argparse.Namespace) -> int | None:
    """Measure this machine and write its device file. Errors: `RunError`."""
    if not args.calibrate:
        return None
    from lockstep.launchers.start import joining
    from lockstep_plan.calibrate import calibrate

    _, _, run = before_a_run.measured_run(args)
    for name in ("strategies", "micro_batches", "over", "weak"):
        if getattr(args, name):
            raise RunError(
                "LS8089",
                f"--{name.replace('_', '-')}: not supported with --calibrate, which measures one run; set its "
                "keys instead",
            )
    if joining():
        raise RunError(
            "LS8090", "bench --calibrate starts the processes of each job itself; run it outside of torchrun and srun"
        )
    processes = args.processes or before_a_run.upwards(run)
    if min(processes) < 1:
        raise RunError("LS8091", f"--processes: invalid value {min(processes)}; expected an integer >= 1")
    folder, console = Path(args.out or f"{run.folder}-calibration"), Console(True)
    device = calibrate(run, processes, args.steps, args.rounds, folder, console.say)
    console.facts(
        {
            "device": device.name,
            "crowding": ", ".join(f"{n} at once: {factor:.2f}" for n, factor in device.crowding.items()),
            "file": str(folder / "device.yaml"),
        }
    )
    return 0
