"""A rank that fails says so once for its machine; the ranks that only lost contact with it do not.

In: an exception. Out: one traceback on standard error and in OUTPUT/log.txt.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import traceback
from pathlib import Path

from lockstep.config.redaction import one_line
from lockstep.distributed import job_record
from lockstep.distributed.world import World
from lockstep.track.console import error

MARKER = "lockstep-failure-"  # begins the names of files in TMPDIR


def tell_failure(caught: Exception, world: World | None, log: Path | None = None) -> None:
    """The traceback, from the first rank of this machine that fails; the others only lost contact with it.

    The first one creates a file that no other can create. Its name is that of this formation of this job and of no
    other, whatever earlier ones have left; where no file can be made, each rank speaks.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # a run id may be "none", a parent 1, and membership may change without a restart being counted
        parent = job_record.born(os.getppid()) or ""
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        formation = [os.environ.get(name, "") for name in names] + [os.getppid(), parent]
        name = (
            f"{MARKER}{os.environ['TORCHELASTIC_RUN_ID']}-{hashlib.sha256(repr(formation).encode()).hexdigest()[:16]}"
        )
        try:
            with open(Path(tempfile.gettempdir()) / name, "x", encoding="utf-8"):
                pass
        except FileExistsError:
            return
        except OSError:  # a full disk, no folder: told twice is better than not at all
            pass
    who = f"rank {world.rank} of {world.size} on {world.host}" if world is not None else "a process"
    if lost_contact(caught):
        error(f"{who} lost contact with another rank: {one_line(caught, 200)}", log)
    else:
        error(f"{who} failed at {time.strftime('%H:%M:%S')}:\n{''.join(traceback.format_exception(caught))}", log)


def lost_contact(caught: Exception) -> bool:
    """Whether this rank failed because another one did."""
    return any(sign in str(caught) for sign in _LOST)


# What gloo says on the ranks that are left when one is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")
