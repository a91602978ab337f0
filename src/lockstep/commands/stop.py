"""`lockstep stop`: ask a run to save and end, wherever it was launched."""

from __future__ import annotations

import argparse
import time

from lockstep import start
from lockstep.commands.status import NOT_WRITTEN, run_of, state_of, told
from lockstep.console import Console, error
from lockstep.run import RunError

HELP = "ask the run of OUTPUT to save a checkpoint and end with status 75"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    parser.add_argument(
        "--wait", type=float, default=300, metavar="SECONDS", help="how long to wait for its end (default 300); 0: not"
    )


def main(known: argparse.Namespace) -> int:
    """Status 0 when it has ended (or, with `--wait 0`, was asked to), 1 when it still runs."""
    run, record = run_of(known.output)
    if record is None:
        raise RunError(f"{known.output}: {NOT_WRITTEN}")
    if known.wait < 0:
        raise RunError(f"--wait: {known.wait:g} is not a number of seconds")
    launcher, console = start.launcher_named(record.launcher), Console(True)
    state = state_of(run, record)
    if not state.live and state.word != "unknown":
        console.say(f"{run.folder} does not run: {told(state)}")
        return 0
    console.say(launcher.stop(run, record))
    until = time.monotonic() + known.wait
    while (state := state_of(run, record)).live and time.monotonic() < until:
        time.sleep(0.2 if record.job is None else 2.0)  # a scheduler is not asked more often
    console.say(f"{run.folder}: {told(state)}")
    if state.live and known.wait:
        error(
            f"it still runs after {known.wait:g} s; it ends after its step and the checkpoint, or ask for more --wait"
        )
        return 1
    return 0
