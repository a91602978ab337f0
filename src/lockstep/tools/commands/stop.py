"""`lockstep stop`: ask a run to save and end, wherever it was launched."""

from __future__ import annotations

import argparse
import time

from lockstep.config.run import RunError
from lockstep.distributed import job_record
from lockstep.tools.commands.status import NOT_WRITTEN, launcher_of, run_of, state_of, state_sentence, trust
from lockstep.track.console import Console, error


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output")
    trust(parser)
    parser.add_argument(
        "--wait", type=float, default=300, metavar="SECONDS", help="how long to wait for its end (default 300); 0: not"
    )


def main(known: argparse.Namespace) -> int:
    """Status 0 when it has ended (or, with `--wait 0`, was asked to), 1 when it still runs."""
    run, record = run_of(known.output, known.trust)
    if record is None:
        raise RunError(f"{known.output}: {NOT_WRITTEN}")
    if known.wait < 0:
        raise RunError(f"--wait: {known.wait:g} is not a number of seconds")
    if not known.trust and (owner := job_record.stranger(run.folder)) is not None:
        raise RunError(
            f"{known.output}/{job_record.FILE} belongs to user {owner} and not to you, and may name any process or job "
            "of yours; if you know what it names, ask with --trust"
        )
    launcher, console = launcher_of(record, known.trust), Console(True)
    state = state_of(run, record, known.trust)
    if not state.live and state.word != "unknown":
        console.say(f"{run.folder} does not run: {state_sentence(state)}")
        return 0
    console.say(launcher.stop(run, record))
    until = time.monotonic() + known.wait
    while (state := state_of(run, record, known.trust)).live and time.monotonic() < until:
        time.sleep(0.2 if record.job is None else 2.0)  # a scheduler is not asked more often
    console.say(f"{run.folder}: {state_sentence(state)}")
    if state.live and known.wait:
        error(
            f"it still runs after {known.wait:g} s; it ends after its step and the checkpoint, or ask for more --wait"
        )
        return 1
    return 0
