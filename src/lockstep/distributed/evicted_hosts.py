"""Machines that `guard` has taken out of a run: `OUTPUT/excluded-HOST.json`, one for each.

In: a host that computed wrongly, and in which step. Out: a file that a later start on that host finds, and ends. It is
there until somebody deletes it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.config.run import RunError, replace_text


@dataclass(frozen=True)
class Excluded:
    """One machine."""

    host: str
    step: int  # the one that it computed wrongly, counted from 1
    time: float  # seconds since 1970

    def __str__(self) -> str:
        return f"{self.host}, which computed wrongly in step {self.step} (guard)"


def file_of(host: str) -> str:
    return f"excluded-{host}.json"


def note(folder: Path, host: str, step: int) -> None:
    """Write it down; several ranks may. A folder that cannot be written to is told by what needs it, not here."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / file_of(host), json.dumps(asdict(Excluded(host, step, round(time.time(), 3)))) + "\n")


def of(folder: Path) -> list[Excluded]:
    """Those that are written down, in the order of their steps."""
    hosts = []
    for path in folder.glob(file_of("*")):
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            hosts.append(Excluded(str(record["host"]), int(record["step"]), float(record["time"])))
    return sorted(hosts, key=lambda each: (each.step, each.host))


def check(folder: Path) -> None:
    """This machine may train this run. Errors: `RunError`."""
    here = socket.gethostname()
    if (path := folder / file_of(here)).exists():
        raise RunError(
            f"{here} was taken out of this run, because it computed wrongly (guard); once it is mended, delete {path}"
        )
