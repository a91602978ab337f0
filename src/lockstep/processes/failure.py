"""A rank that fails says so once for its machine; the ranks that only lost contact with it do not.

In: an exception. Out: one traceback on standard error and in OUTPUT/log.txt.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from pathlib import Path

from lockstep.console import error
from lockstep.world import World


def tell_failure(caught: Exception, world: World | None, log: Path | None = None) -> None:
    """The traceback, from the first rank of this machine that fails; the others only lost contact with it.

    The first one creates a file that no other can create. A restart has a number of its own.
    """
    # torchrun's run id is "none" unless given: its workers' parent tells one job from the next
    job = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    attempt = f"{job}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        with open(Path(tempfile.gettempdir()) / f"lockstep-failure-{attempt}", "x", encoding="utf-8"):
            pass
    except OSError:
        return
    who = f"rank {world.rank} of {world.size} on {world.host}" if world is not None else "a process"
    if lost_contact(caught):
        error(f"{who} lost contact with another rank: {' '.join(str(caught).split())[:200]}", log)
    else:
        error(f"{who} failed at {time.strftime('%H:%M:%S')}:\n{''.join(traceback.format_exception(caught))}", log)


def lost_contact(caught: Exception) -> bool:
    """Whether this rank failed because another one did."""
    return any(sign in str(caught) for sign in _LOST)


# What gloo says on the ranks that are left when one is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")
