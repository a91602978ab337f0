"""`lockstep plan`: what would be started, and what it amounts to; refuses what `train` refuses. Starts nothing."""

from __future__ import annotations

import argparse
import itertools
import shlex
from typing import TYPE_CHECKING

from lockstep.config.errors import DONE, FAILED
from lockstep.config.run import Run, RunError
from lockstep.launchers import start
from lockstep.launchers.extend_run import further
from lockstep.tools.commands import run_file
from lockstep.track.console import Console, error

if TYPE_CHECKING:
    from lockstep.data.tokens import Prepared
    from lockstep.launchers.launcher import Launcher, LaunchPlan
    from lockstep.training.resolve import Job


def arguments(parser: argparse.ArgumentParser) -> None:
    run_file.arguments(parser)
    parser.add_argument(
        "--offline", action="store_true", help="what has to be asked of the Hub, and cannot be, is no failure"
    )
    parser.add_argument("--simulate", action="store_true", help="memory, messages and time, without the machines")
    parser.add_argument(
        "--processes", type=int, nargs="+", metavar="N", help="simulate so many, one plan each; default: the run file's"
    )
    parser.add_argument("--device", default="h100", help="h100, a100, or a YAML file of rates (default h100)")
    parser.add_argument("--suggest", action="store_true", help="simulate strategies and micro_batches, and rank them")
    parser.add_argument("--price", type=float, metavar="P", help="of an hour of one device")
    parser.add_argument("--out", metavar="FILE", help="also as a page: FILE.html")


def main(known: argparse.Namespace) -> int:
    run = further(run_file.run_of(known), Console(True).say)
    if known.simulate or known.suggest:
        if known.offline:
            raise RunError("--offline: says something to a plan without --simulate or --suggest only")
        from lockstep.tools.planner.options import answered

        return answered(run, known.processes, known.device, known.suggest, known.price, known.out)
    for name in ("processes", "price", "out"):
        if getattr(known, name) is not None:
            raise RunError(f"--{name}: says something to --simulate only; for this plan set launch.processes")
    launcher = start.launcher_of(run)
    plan = launcher.plan(run)
    job = start.examined(run, launcher, plan)
    console = Console(True)
    counts = {r * run.micro_batches // plan.processes for r in range(plan.processes + 1)}
    bounds = sorted(counts)
    shares = sorted({b - a for a, b in itertools.pairwise(bounds)})
    each = f"each with {' or '.join(map(str, shares))} of {run.micro_batches} micro-batches a step"
    if run.strategy.name == "pipeline" or "tensor_parallel" in run.strategy.options:
        each = f"{run.micro_batches} micro-batches a step, some processes working on the same ones"
    console.facts(
        {
            "launcher": run.launch.name,
            "processes": f"{plan.processes}, {each}",
            "command": shlex.join(plan.command),
            "variables": " ".join(f"{k}={v}" for k, v in plan.variables.items()) or "none",
            "strategy": f"{run.strategy.name}{', exact where it can be' if run.strategy.exact else ''}",
            **(amounts(run) if isinstance(job, str) else sizes_of(job)),
            "output": f"{run.folder}{f', copied to {run.remote_dir}' if run.remote_dir else ''}",
        }
    )
    if isinstance(job, str):
        console.say(f"note: what it amounts to cannot be told here: {job}")
    else:
        for text in remarks(run, job.data):
            console.note(text)
    for path, text in plan.files.items():
        console.say(f"--- {path}\n{text}")
    for note in plan.notes:
        console.say(f"note: {note}")
    wrong = failures(run, launcher, plan, job, known.offline)
    for text in wrong:
        error(f"this would fail: {text}")
    return FAILED if wrong else DONE


def failures(run: Run, launcher: Launcher, plan: LaunchPlan, job: Job | str, offline: bool) -> list[str]:
    """What would fail once it is started, and is no mistake in the run file."""
    if isinstance(job, str):
        if offline or start.looked_at_there(launcher):
            return []
        return [f"{job}. --offline plans without the Hub"]
    from lockstep.training import model_stats

    there = launcher.memory(run, plan)
    short = None if there is None else model_stats.shortage(run, job.data, plan.processes, there)
    return [short] if short is not None else []


def amounts(run: Run) -> dict[str, str]:
    """What the run file alone says of it."""
    return {
        "model": run.model.source or f"{run.model.type} from scratch",
        "data": ", ".join(each.name for each in run.data.sources or ()) or str(run.data.source or run.data.train),
        "length": f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs",
    }


def remarks(run: Run, prepared: Prepared) -> list[str]:
    """Notes on its data, and on the entries of its model's config."""
    from lockstep.training import model_stats

    return model_stats.remarks(run, prepared)


def sizes_of(job: Job) -> dict[str, str]:
    """What was decided, and what its data and its model say besides."""
    from lockstep.training import model_stats

    return {"decided": job.summary()} | model_stats.facts(job.run, job.data, job.processes)
