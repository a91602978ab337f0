"""Checkpoint folders in OUTPUT on rank 0's disk: atomic commit, pruning, and free space. Nothing here is collective.

A folder gets a checkpoint's name only when complete, and loses it before it is deleted. `DiskSpace` estimates what a
run still writes, refuses a run that does not fit, warns when space runs out, removes older checkpoints to make room for
the newest, and proposes other folders for the model. Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import Manifest, folder_of, name_of, newest_first, superfluous
from lockstep.config.output_files import FolderInside, clear, redirected, sync
from lockstep.config.run import RunError
from lockstep.config.sections import CheckpointSection
from lockstep.data.cache import cache_folder
from lockstep.data.job import Job

if TYPE_CHECKING:
    from lockstep.checkpoint.shard_files import Written


def rename_into_place(output: Path, manifest: Manifest, aside: Path) -> Path:
    """Write the manifest into a folder and rename it to its checkpoint's name in OUTPUT, replacing what is there.
    Errors: `OSError`."""
    from lockstep.checkpoint.shard_files import write

    write(aside / manifests.FILE, [manifest.dump()])
    sync(aside)
    final = folder_of(output) / name_of(manifest.step)
    if isinstance(manifests.read_manifest(final), Manifest):
        remove(final)  # damaged: otherwise the run would have resumed from it
    elif os.path.lexists(final):  # unreadable here, but perhaps not elsewhere: keep it under another name
        os.rename(final, final.with_name(f"{final.name}.unread-{secrets.token_hex(4)}"))
    os.rename(aside, final)
    sync(final.parent)
    return final


def prune(
    output: Path, section: CheckpointSection, average: int | None, newest: Path, in_use: Collection[str] = ()
) -> None:
    """Remove superfluous checkpoints; failures to remove are ignored."""
    with suppress(OSError):
        for path in superfluous(output, section, average, newest):
            if path.name not in in_use:
                remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint, renaming it first, so that a half-deleted folder never has a checkpoint's name."""
    gone = path.with_name(f".{path.name}.removed")
    clear(gone)
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return
    clear(gone)


def clear_away(output: Path) -> None:
    """Remove incomplete files left by killed processes."""
    for pattern in (".step-*.partial", ".step-*.removed"):
        for path in folder_of(output).glob(pattern):
            clear(path)


_PAGES = 2**18  # bytes: report page, run.yaml, log.txt and similar
_EXPORT_FILE = 5 * 10**10  # bytes after which transformers begins another file of weights
_CERTAIN = 0.9  # fraction of an estimated size that a file is certain to reach
_A_STEP, _A_LINE, _A_RANK = 128, 600, 256  # bytes per line of fingerprints.jsonl, other .jsonl files, ranks.jsonl


class DiskSpace:
    """Disk space of one run's OUTPUT. Used on rank 0."""

    def __init__(self, job: Job) -> None:
        self.run = run = job.run
        self.checkpoint = 0  # bytes of one checkpoint, all ranks together
        self.export = 0  # bytes
        self.export_written = False  # whether an export was written, and removed, before training
        self.too_large: str | None = None  # why a file of that export could not be written: the system's limit
        self._folder, self._checkpoints = run.folder.resolve(), FolderInside(run.folder, folder_of(run.folder).name)
        self._low = False  # whether `warning` has already warned
        self._written: tuple[str, bytes] | None = None  # name and manifest of the last checkpoint written

    def away(self) -> str | None:
        """Explain why OUTPUT can no longer be written (it was moved or replaced), or return None. Rank 0's answer
        counts."""
        return redirected(self._folder)

    def checkpoints_away(self) -> str | None:
        """Explain why checkpoints in OUTPUT can no longer be written or removed, or return None. Rank 0's answer
        counts."""
        if (fault := self._checkpoints.redirected()) is not None and self.away() is None and self._written is not None:
            name, manifest = self._written
            with suppress(OSError):  # moved, e.g. to another disk, and replaced by a link
                if (self._checkpoints.path / name / manifests.FILE).read_bytes() == manifest:
                    return None
        return fault

    def check(self, step: int, steps: int, every: int, processes: int) -> list[str]:
        """Check, before training continues after `step` of `steps` updates with a checkpoint every `every` steps, that
        the disk has space. Returns notes for the user. Errors: `RunError`, if a checkpoint and the export do not fit.
        """
        saves = -(-(steps - step) // every) if every else int(step < steps)
        self._check_file_limit(self.checkpoint // processes if saves else 0)
        if (free := free_bytes(self.run.folder)) is None:
            return []
        lines = (steps - step) // self.run.track.every + 1
        records = _PAGES + (steps - step) * _A_STEP + lines * (_A_LINE + processes * _A_RANK)
        least = records + self.export + (self.checkpoint if saves else 0)
        there = len(list(newest_first(self.run.folder)))
        spare = sum(size_of(path) for path in self._dispensable())
        keep = max(self.run.checkpoint.keep, self.run.average.last or 0) + len(self.run.checkpoint.at)
        most = min(keep + 1 + bool(self.run.checkpoint.best), saves + there)
        full_need = records + self.export + max(0, most - there) * self.checkpoint
        has = f"output: the disk of {self.run.folder} has {_size(free)} left"
        if free + spare < least:
            parts = [f"a checkpoint ({_size(self.checkpoint)})"] * bool(saves)
            parts += [f"the export ({_size(self.export)})", f"its records ({_size(records)})"]
            fault = f"{has}, and the run needs {_size(least - spare)}: for {', '.join(parts)}"
            rescue = self.run.checkpoint.rescue
            if rescue is None or (free_bytes(Path(rescue).expanduser()) or 0) < self.export:
                raise RunError(
                    "LS6030",
                    f"{fault}. Free disk space, or give another output=FOLDER. To train anyway, set "
                    "checkpoint.rescue=FOLDER on another disk with enough space for the export",
                )
            return [f"{fault}. If the export does not fit at the end, it is written to {rescue}"]
        if free < full_need:
            return [
                f"{has}, and {most} checkpoints of {_size(self.checkpoint)} beside the export ({_size(self.export)}) "
                f"need {_size(full_need)}: older ones are removed early if the next one does not fit"
            ]
        return []

    def _check_file_limit(self, share: int) -> None:
        """Refuse a system limit on file sizes that is below the export's weights or `share`, a rank's share of a
        checkpoint. Errors: `RunError`."""
        if (most := file_limit()) is None:
            return
        weights = 0 if self.export_written else int(_CERTAIN * min(self.export, _EXPORT_FILE))
        need, what = max((weights, "the export"), (int(_CERTAIN * share), "a checkpoint"))
        if most < need or self.too_large is not None:
            larger = f"{what} has a file of about {_size(int(need / _CERTAIN))}"
            raise RunError(
                "LS6160",
                f"output: a process may write files of at most {_size(most)} here (ulimit -f), and "
                f"{larger if most < need else f'the export has a larger one ({self.too_large})'}, which could "
                "not be written; run ulimit -f unlimited first",
            )

    def warning(self, last: bool) -> str | None:
        """Return a warning when the disk becomes too full for the next writes, else None. Given once, until there is
        space again. `last`: no further checkpoint will be written."""
        free, need = free_bytes(self.run.folder), self._next(last)
        low = free is not None and free < need and free + sum(map(size_of, self._dispensable())) < need
        news, self._low = low and not self._low, low
        if not news or free is None:
            return None
        what = f"the export ({_size(self.export)})"
        what = what if last else f"the next checkpoint ({_size(self.checkpoint)}) and {what}"
        return f"the disk of {self.run.folder} has {_size(free)} left, too little for {what}; free disk space"

    def commit(self, manifest: Manifest, aside: Path, files: list[Written], in_use: Collection[str]) -> str | None:
        """Turn a folder written aside into a checkpoint, atomically, prune, and `clear` for the next writes. Runs in
        the background. `in_use`: names of checkpoints not to remove yet. Errors: `OSError`."""
        if (fault := self.checkpoints_away()) is not None:
            raise OSError(fault)
        for file in files:
            if (size := (aside / file.name).stat().st_size) != file.bytes:
                raise OSError(f"{file.name} has {size} bytes, its rank wrote {file.bytes}")
        final = rename_into_place(self.run.folder, manifest, aside)
        with suppress(OSError):  # a convenience; some file systems (buckets, Windows shares) have no links
            link = final.parent / ".latest.partial"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            os.replace(link, final.parent / "latest")
        prune(self.run.folder, self.run.checkpoint, self.run.average.last, final, in_use)
        self._written = name_of(manifest.step), manifest.dump()
        return self.clear(manifest.step == manifest.steps, in_use)

    def clear(self, last: bool, in_use: Collection[str] = ()) -> str | None:
        """Remove older checkpoints that the run would keep, oldest first, until the next writes fit. Never removes the
        newest, the best, or those needed for an average. `in_use`: names not to remove. Returns a message about the
        removed checkpoints, or None."""
        gone = []
        for path in reversed(self._dispensable() if self.checkpoints_away() is None else []):
            free = free_bytes(self.run.folder)
            if free is None or free >= self._next(last):
                break
            with suppress(OSError):
                if path.name not in in_use:
                    remove(path)
                    gone.append(path.name)
        if not gone:
            return None
        return f"the disk of {self.run.folder} is nearly full; to make room, lockstep removed {', '.join(gone)}"

    def elsewhere(self) -> Iterator[Path]:
        """Yield new folders for the model if OUTPUT cannot be written, best first: in `checkpoint.rescue`, the cache,
        the home folder, the temporary folder, memory (/dev/shm). Skips those without enough space."""
        rescue = self.run.checkpoint.rescue
        rescue_folders = [Path(rescue).expanduser()] if rescue else []
        rescue_folders.append(cache_folder() / "rescued")
        for place in (*rescue_folders, Path("~").expanduser(), Path(tempfile.gettempdir()), Path("/dev/shm")):
            with suppress(OSError):
                if place in rescue_folders:
                    place.mkdir(parents=True, exist_ok=True)
                if (free := free_bytes(place)) is None or free > self.export:
                    yield Path(tempfile.mkdtemp(prefix=f"{self.run.name}-", dir=place))

    def _next(self, last: bool) -> int:
        return _PAGES + self.export + (0 if last else self.checkpoint)

    def _dispensable(self) -> list[Path]:
        """Checkpoints that a run with `checkpoint.keep: 1` would not keep, among those with readable manifests."""
        one = self.run.checkpoint.model_copy(update={"keep": 1})
        return superfluous(self.run.folder, one, self.run.average.last)


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may write on the disk of a folder, which need not exist yet. None if the file system does
    not report it."""
    for path in (folder, *folder.parents):
        try:
            disk = os.statvfs(path)
        except OSError:
            continue
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else None
    return None


def file_limit() -> int | None:
    """Largest file in bytes that this process may write (`ulimit -f`), or None for no limit."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if most == resource.RLIM_INFINITY else most


def size_of(folder: Path) -> int:
    """Total bytes of the files in a folder; unreadable ones are skipped."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def _size(count: int) -> str:
    """Format bytes for display."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.0f} kB"
