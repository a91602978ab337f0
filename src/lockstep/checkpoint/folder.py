"""OUTPUT/checkpoints on rank 0's disk: a folder gets a checkpoint's name when it is whole, and loses it before it goes.

In: a folder written aside. Out: a checkpoint, and no more of them than the run keeps. Nothing here is collective.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import Manifest, folder_of, name_of
from lockstep.config.run import Run

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Written


def commit(run: Run, manifest: Manifest, aside: Path, files: list[Written], held: Collection[str] = ()) -> None:
    """All or nothing, in the background. `held`: names of checkpoints that are not removed yet. Errors: `OSError`."""
    for file in files:
        if (size := (aside / file.name).stat().st_size) != file.bytes:
            raise OSError(f"{file.name} has {size} bytes, its rank wrote {file.bytes}")
    final = placed(run, manifest, aside)
    with suppress(OSError):  # for people only, and some file systems (of buckets, of Windows shares) have no links
        link = final.parent / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, final.parent / "latest")
    prune(run, final, held)


def placed(run: Run, manifest: Manifest, aside: Path) -> Path:
    """Give a folder its manifest and its name, in the place of what has it. Errors: `OSError`."""
    from lockstep.checkpoint.storage import sync, write

    write(aside / manifests.FILE, [manifest.dump()])
    sync(aside)
    final = folder_of(run) / name_of(manifest.step)
    if isinstance(manifests.read_manifest(final), Manifest):
        remove(final)  # its files are damaged, or it would have been resumed from
    elif os.path.lexists(final):  # it could not be read here: elsewhere, or to a person, it may be worth something
        os.rename(final, final.with_name(f"{final.name}.unread-{secrets.token_hex(4)}"))
    os.rename(aside, final)
    sync(final.parent)
    return final


def prune(run: Run, newest: Path, held: Collection[str] = ()) -> None:
    """Remove what is too much, which may stay where it cannot be removed."""
    with suppress(OSError):
        for path in manifests.superfluous(run, newest):
            if path.name not in held:
                remove(path)


def remove(path: Path) -> None:
    """Never half: a checkpoint that is being deleted has no checkpoint's name."""
    gone = path.with_name(f".{path.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def clear_away(run: Run) -> None:
    """Remove the half-written files of processes that were killed."""
    for pattern in (".step-*.partial", ".step-*.removed"):
        for path in folder_of(run).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
