"""What a finished or stopped run still owes: copies in its mirror, and the push of its export to the Hub.

In: OUTPUT. Out: an exit status, and words for the user. Imports no torch at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.checkpoint.export import pending, push_pending
from lockstep.checkpoint.mirror import Mirror, finish
from lockstep.config.exit_status import DONE, FAILED, STOPPED
from lockstep.config.run import Run
from lockstep.distributed.stops import Stopped
from lockstep.track.console import Console, error

if TYPE_CHECKING:
    from lockstep.distributed.world import World
    from lockstep.training.session import Session


def owed(run: Run, say: Callable[[str], None], mirror: Mirror | None = None) -> int:
    """Copy and push what is not there yet. Rank 0 only. Returns the exit status: 1 for what was tried in vain, which
    leaves it for another try."""
    fault = finish(run, say, mirror)
    if fault is not None:
        error(
            f"{run.folder} is not whole in {run.mirror}: {fault}. Everything is in {run.folder}; the same command "
            "copies what is missing"
        )
    elif run.mirror is not None:
        say(f"checkpoints and export are in {run.mirror}")
    return max(DONE if fault is None else FAILED, push_pending(run, say))


def delivered(run: Run, world: World, console: Console, mirror: Mirror | None = None) -> int:
    """The same, which a stop signal ends. Rank 0 only. Returns the exit status."""
    if run.mirror is None and not pending(run):
        return DONE
    try:
        with world.stop.interrupts():
            return owed(run, console.say, mirror)
    except Stopped:
        where = " and ".join(place for place in (run.mirror, run.hub.push_to) if place)
        console.say(
            f"stopped on request before {where} had the model, which is in {run.folder}/export; the same command "
            "goes on with that"
        )
        return STOPPED


def at_a_stop(session: Session, console: Console) -> None:
    """Wait for what is being copied, which the time for a collective limits: what asked for the stop may not wait
    longer. Says what the mirror lacks. Collective."""
    run = session.run
    missing = session.checkpoints.kept.rest(run.launch.timeout_s / 2)
    if missing is not None:
        console.note(f"{missing}. Here the run goes on from {run.folder}; elsewhere from what is there")
