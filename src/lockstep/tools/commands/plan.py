"""`lockstep plan`: what would be started. Starts nothing."""

from __future__ import annotations

import argparse
import itertools
import shlex

from lockstep.launchers import start
from lockstep.tools.commands import run_file
from lockstep.track.console import Console

HELP = "show what would be started; start nothing"
arguments = run_file.arguments


def main(known: argparse.Namespace) -> int:
    run = run_file.run_of(known)
    launcher = start.launcher_of(run)
    plan = launcher.plan(run)
    start.examined(run, launcher, plan)
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
            "length": f"{run.steps} steps" if run.steps else f"{run.epochs:g} epochs",
            "output": str(run.folder),
        }
    )
    for path, text in plan.files.items():
        console.say(f"--- {path}\n{text}")
    for note in plan.notes:
        console.say(f"note: {note}")
    return 0
