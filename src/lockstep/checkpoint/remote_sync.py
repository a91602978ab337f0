"""The mirror of a run in an object store (`remote_dir`): list, upload and download its checkpoints.

`RemoteSync` uploads the checkpoints that a run keeps, and its export: MIRROR/checkpoints/step-NNNNNN/ holds the same
files, each verified after upload, with the manifest last, so that an interrupted upload never counts as a checkpoint;
MIRROR/export has export.json last. On a machine without local checkpoints, it downloads the newest intact one.

Copying runs in a thread of rank 0, whose OUTPUT must contain the files of all ranks; `storage.share_out` refuses to
save otherwise. A store may list new names late, so MIRROR/checkpoints/index.json also names the steps, and manifests
are requested by name. Only one run may write to a mirror at a time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint import export_hashes, folder
from lockstep.checkpoint.manifest import (
    FILE,
    Manifest,
    changed,
    folder_of,
    name_of,
    newest_first,
    newest_whole,
    parsed,
    to_keep,
)
from lockstep.config.data_sources import address_of
from lockstep.config.run import Run, RunError
from lockstep.data.job import Job
from lockstep.data.object_store import BRIEF, Bucket, Object, StoreError, download, require
from lockstep.track.busy import ACTIVITY

PROBE = "lockstep-was-here"  # object written and removed before a run, to test write permission
_STEP = re.compile(r"step-(\d{6,})/")


class RemoteSync:
    """Copies of one run in an object store. Messages are queued; `tell` passes them to `say` in the caller's thread."""

    def __init__(self, run: Run, say: Callable[[str], None] = lambda text: None) -> None:
        """Does not access the store yet."""
        assert run.remote_dir is not None
        self.run, self.address, self._say = run, address_of(run.remote_dir), say
        self.in_use: frozenset[str] = frozenset()  # names of checkpoints being copied, which must not be removed
        self.fault: str | None = None  # why the last copy failed
        self._there: dict[int, Manifest] | None = None  # complete remote checkpoints by step; None: not listed yet
        self._damaged: set[str] = (
            set()
        )  # damaged or unreadable remote checkpoints: kept until their step is saved again
        self._lock, self._busy, self._again = threading.Lock(), False, False
        self._words: list[str] = []
        self._opened: Bucket | None = None

    @property
    def _bucket(self) -> Bucket:
        if self._opened is None:
            self._opened = Bucket(self.address)
        return self._opened

    # -- listing and downloading -------------------------------------------------------------------------------------

    def list_checkpoints(self) -> list[tuple[str, Manifest | str]]:
        """List remote checkpoints, newest first: (name, manifest or description of its fault). Folders without a
        manifest do not count. Errors: `StoreError`."""
        steps = set(self._listed())
        with suppress(ValueError, TypeError, KeyError):
            steps |= {int(step) for step in json.loads(self._read("checkpoints/index.json") or "{}")["steps"]}
        copies = []
        for step in sorted(steps, reverse=True):
            if (content := self._read(f"checkpoints/{name_of(step)}/{FILE}")) is not None:
                copies.append((name_of(step), parsed(content, name_of(step))))
        self._damaged |= {name for name, manifest in copies if isinstance(manifest, str)}
        self._there = {m.step: m for name, m in copies if isinstance(m, Manifest) and name not in self._damaged}
        return copies

    def fetch(self, job: Job, name: str, manifest: Manifest | str) -> str | None:
        """Download a checkpoint into OUTPUT and verify it. Returns a description of its fault, or None. Errors:
        `RunError` if it belongs to another run; `OSError`."""
        if isinstance(manifest, str):
            return manifest
        if (reason := changed(job, manifest, str(self.address))) is not None:
            raise RunError("LS6042", reason)
        if bad := [file for file in manifest.hashes if not re.fullmatch(r"\w[\w.-]*", file)]:
            return f"{FILE} names {bad[0]!r}, which is no file of a checkpoint"
        aside = folder_of(self.run.folder) / f".{name}.fetched.partial"
        come = [0]

        def tell(count: int) -> None:
            come[0] += count
            ACTIVITY.set(f"downloading {name} from {self.address}, {come[0] / 1e6:,.1f} MB")

        def one(file: str) -> str | None:
            at = self.address.below(f"checkpoints/{name}/{file}")
            if (there := self._bucket.find(at)) is None:
                return f"{file} is missing"
            for _ in range(2):  # retry once: a transfer error does not recur
                if download(self._bucket, there, aside / file, tell) == manifest.hashes[file]:
                    return None
            return f"{file} does not match its hash"

        try:
            with ThreadPoolExecutor(4) as pool:
                fault = next((fault for fault in pool.map(one, sorted(manifest.hashes)) if fault), None)
        except StoreError as error:
            return str(error)
        if fault is not None:
            self._damaged.add(name)
            (self._there or {}).pop(manifest.step, None)
            return fault
        folder.rename_into_place(self.run.folder, manifest, aside)
        return None

    # -- copying -----------------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """Start or continue copying to the object store in the background. Called when OUTPUT has new content."""
        with self._lock:
            if self._busy:
                self._again = True
                return
            self._busy, self._again = True, False
        threading.Thread(target=self._until_done, name="lockstep-mirror", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether copying is in progress."""
        return self._busy

    def tell(self) -> None:
        """Pass queued messages to `say`."""
        while self._words:
            self._say(self._words.pop(0))

    def missing(self) -> str | None:
        """Explain why OUTPUT's newest checkpoint is not in the store, as far as known, or return None."""
        newest = next((m for _, m in newest_first(self.run.folder)), None)
        if newest is None or (newest.step in (self._there or {}) and self.fault is None):
            return None
        there = max(self._there or {}, default=None)
        has = f"the newest one there is {name_of(there)}" if there is not None else "there is none yet"
        return f"{name_of(newest.step)} is not in {self.address} ({self.fault or 'it was not copied in time'}); {has}"

    def _until_done(self) -> None:
        more = True
        while more:
            try:
                self.copy()
                self.fault = None
            except Exception as error:  # any error: training continues, and a thread's exception would be lost
                self.fault = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
                self._words.append(
                    f"{self.run.folder} could not be copied to {self.address} ({self.fault}); the next "
                    "checkpoint retries"
                )
            self.in_use = frozenset()
            with self._lock:
                more = self._busy = self._again
                self._again = False

    def copy(self) -> None:
        """Synchronize the mirror with OUTPUT: upload the checkpoints that OUTPUT keeps, newest first, remove the
        others, and upload the export if there is one. Unchanged files are not sent again. Errors: `StoreError`,
        `OSError`."""
        if self._there is None:
            self.list_checkpoints()
        there = self._there if self._there is not None else {}
        here = {m.step: (path, m) for path, m in newest_first(self.run.folder)}
        needed = to_keep(self.run.checkpoint, self.run.average.last, {step: m for step, (_, m) in here.items()})
        self.in_use, faults = frozenset(name_of(step) for step in needed), list[str]()
        for step in sorted(needed, reverse=True):
            path, manifest = here[step]
            if there.get(step) == manifest:
                continue
            try:
                self._copy(path, manifest, there.get(step))
            except FileNotFoundError:
                if path.exists():
                    raise
                continue  # removed meanwhile: no longer kept
            except StoreError as error:
                if error.again:
                    raise
                faults.append(str(error))  # e.g. damaged locally: still copy the others
                continue
            there[step] = manifest
            self._damaged.discard(path.name)
        self.in_use = frozenset()
        if here:
            folder.prune(self.run.folder, self.run.checkpoint, self.run.average.last, here[max(here)][0])
        self._tidy(there)
        self.copy_export(self.run.folder)
        if faults:
            raise StoreError("LS6043", "; ".join(faults))

    def _copy(self, path: Path, manifest: Manifest, before: Manifest | None) -> None:
        at, content = self.address.below(f"checkpoints/{path.name}"), (path / FILE).read_bytes()
        if before is None or before.hashes != manifest.hashes:
            if before is not None or path.name in self._damaged:
                self._bucket.remove(at.below(FILE))  # not a checkpoint until the new files are uploaded
            for file, sha256 in sorted(manifest.hashes.items()):
                self._bucket.upload(path / file, at.below(file), sha256)
        self._bucket.write(at.below(FILE), content)

    def _tidy(self, there: dict[int, Manifest]) -> None:
        """Write the index; remove superfluous checkpoints, and incomplete ones older than the newest."""
        needed = to_keep(self.run.checkpoint, self.run.average.last, there)
        index = json.dumps({"steps": sorted(needed)}).encode()
        if self._read("checkpoints/index.json") != index:
            self._bucket.write(self.address.below("checkpoints/index.json"), index)
        for step, objects in self._listed().items():
            cut_off = step not in there and name_of(step) not in self._damaged and step < max(there, default=0)
            if not cut_off and (step in needed or step not in there):
                continue
            try:
                self._bucket.remove(self.address.below(f"checkpoints/{name_of(step)}/{FILE}"))  # manifest first
                for each in objects:
                    self._bucket.remove(each.address)
            except StoreError as error:
                if error.again:
                    raise
                return  # no permission to remove, as `check` reported: keep all
            there.pop(step, None)

    def copy_export(self, source: Path) -> None:
        """Upload the export of an output folder, unless it is damaged. Unchanged files are not sent again. Errors:
        `StoreError`, `OSError`."""
        if export_hashes.damage(source) is not None:
            return
        hashes = {}
        for path in sorted((source / "export").rglob("*")):
            if path.is_file() and not path.is_symlink():
                hashes[path.relative_to(source / "export").as_posix()] = export_hashes.sha256_of(path)
        content = json.dumps(hashes, indent=1).encode() + b"\n"  # the user may have edited the card
        if (before := self._read(export_hashes.FILE)) == content:
            return
        if before is not None:
            self._bucket.remove(self.address.below(export_hashes.FILE))
        for name, sha256 in hashes.items():
            self._bucket.upload(source / "export" / name, self.address.below(f"export/{name}"), sha256)
        new = {str(self.address.below(f"export/{name}")) for name in hashes}
        for each in self._bucket.inside(self.address.below("export")) if before is not None else ():
            if str(each.address) not in new:
                self._bucket.remove(each.address)
        self._bucket.write(self.address.below("run.yaml"), self.run.dump().encode())
        self._bucket.write(self.address.below(export_hashes.FILE), content)

    def _listed(self) -> dict[int, list[Object]]:
        """Objects in the checkpoint folders, by step. Errors: `StoreError`."""
        at, objects = self.address.below("checkpoints"), dict[int, list[Object]]()
        for each in self._bucket.inside(at):
            if (step := _STEP.match(each.address.path.removeprefix(f"{at.path}/"))) is not None:
                objects.setdefault(int(step[1]), []).append(each)
        return objects

    def _read(self, path: str) -> bytes | None:
        """Read an object; None if it does not exist. Errors: `StoreError`."""
        try:
            return self._bucket.read(self.address.below(path))
        except StoreError as error:
            if error.absent:
                return None
            raise

    def finish(self) -> str | None:
        """Copy everything that the object store still lacks at the end of a run, including the export. Rank 0 only.
        Returns the reason if something is missing, or None. A signal handler may interrupt the copy with an exception;
        the next call resumes it."""
        self.offer()
        while self.busy:
            time.sleep(0.1)
        return self.fault


def require_extra(remote_dir: str) -> None:
    """Check that the library that the mirror needs is installed. Errors: `RunError`."""
    require(address_of(remote_dir), "remote_dir")


def check(job: Job) -> list[str]:
    """Refuse, before training, a mirror that cannot be read and written, tested with a small object. Returns notes for
    the user. Errors: `RunError`."""
    return _checked(job, _refuse_unwritable)


def check_other(job: Job) -> None:
    """Refuse, before training, a mirror that holds another run. Errors: `RunError`."""

    def refuse(mirror: RemoteSync, bucket: Bucket) -> list[str]:
        newest = next((m for _, m in mirror.list_checkpoints() if isinstance(m, Manifest)), None)
        if newest is not None and (reason := changed(job, newest, str(mirror.address))) is not None:
            raise RunError("LS6044", reason)
        return []

    _checked(job, refuse)


def _refuse_unwritable(mirror: RemoteSync, bucket: Bucket) -> list[str]:
    """Write and remove a small object; returns a note if nothing can be removed. Errors: `StoreError`."""
    bucket.write(mirror.address.below(PROBE), b"lockstep\n")
    try:
        bucket.remove(mirror.address.below(PROBE))
    except StoreError as error:
        return [f"remote_dir: nothing can be removed there, so all checkpoints stay: {error}"]
    return []


def _checked(job: Job, refuse: Callable[[RemoteSync, Bucket], list[str]]) -> list[str]:
    """Call `refuse` with the mirror and return its notes. Errors: `RunError`, also for a store
    that does not answer, unless OUTPUT has a checkpoint."""
    require_extra(str(job.run.remote_dir))
    mirror = RemoteSync(job.run)
    try:
        mirror._opened = bucket = Bucket(mirror.address, BRIEF)
        return refuse(mirror, bucket)
    except StoreError as error:
        if error.again and newest_whole(job.run.folder) is not None:
            return [f"remote_dir: {error}; checkpoints are copied when it can be reached"]
        more = "; until it answers, lockstep cannot tell whether there are checkpoints" if error.again else ""
        raise RunError(error.code, f"remote_dir: {error.message}{more}") from error
