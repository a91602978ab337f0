"""Report a failure once per machine, by the rank that failed, and not by ranks that only lost contact with it.

In: the exception that ended a rank. Out: one message on stderr; whether the exception says that another rank is gone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
import traceback
from pathlib import Path

from lockstep.config.errors import CodedError, coded
from lockstep.config.redaction import one_line
from lockstep.distributed import job_record
from lockstep.distributed.process_limits import no_threads
from lockstep.distributed.world import World
from lockstep.track.console import error

MARKER = "lockstep-failure-"  # prefix of files in TMPDIR


def tell_failure(caught: Exception, world: World | None, log: Path | None = None) -> None:
    """Print the traceback, or the message of a `CodedError`, on the first rank of this machine that fails; the others
    only lost contact with it.

    The first one creates a file exclusively, whose name is unique to this incarnation of the job. If no file can be
    created, each rank prints.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # a run id may be "none", a parent 1, and membership may change without a counted restart
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
        except OSError:  # full disk or no folder: a repeated message is better than none
            pass
    who = f"rank {world.rank} of {world.size} on {world.host}" if world is not None else "a process"
    if isinstance(caught, CodedError):
        error(coded(caught.code, f"{who}: {caught.message}"), log)
    elif (text := no_threads(caught)) is not None:
        error(coded("LS7067", f"{who}: {text}, or use fewer processes"), log)
    elif lost_contact(caught):
        error(coded("LS7063", f"{who} lost contact with another rank: {one_line(caught, 200)}"), log)
    else:
        error(
            coded(
                "LS7064", f"{who} failed at {time.strftime('%H:%M:%S')}:\n{''.join(traceback.format_exception(caught))}"
            ),
            log,
        )


def lost_contact(caught: Exception) -> bool:
    """Whether this rank failed because another one did."""
    return any(sign in str(caught) for sign in _LOST)


# gloo's errors on the surviving ranks when one is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")
