"""The checkpoints of a run wherever they are: in OUTPUT, and in the mirror.

In: a run and its ranks. Out: the same list on every rank; one of the mirror's in OUTPUT, where it is to be read. Only
rank 0 speaks to the store, in a thread, so that no collective waits longer than one may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.folder import clear_away
from lockstep.checkpoint.manifest import Manifest, candidates, folder_of, newest_first
from lockstep.checkpoint.progress import best_first
from lockstep.checkpoint.remote_sync import RemoteSync
from lockstep.config.run import Run, RunError
from lockstep.data.object_store import StoreError
from lockstep.data.tokens import Prepared
from lockstep.distributed.activity import ACTIVITY

if TYPE_CHECKING:
    from lockstep.distributed.world import World


def reason_of(error: BaseException | None) -> str | None:
    """Describe an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    if isinstance(error, StoreError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if error is not None else None


class CheckpointCatalog:
    """The checkpoints to go on from. `say` tells the user; it is called on rank 0."""

    def __init__(self, run: Run, world: World, prepared: Prepared, say: Callable[[str], None]) -> None:
        self.run, self.world, self.prepared = run, world, prepared
        self.mirror = RemoteSync(run, say) if run.remote_dir is not None and world.is_main else None

    def list_checkpoints(self) -> tuple[list[tuple[str, Manifest | str, bool]], list[str]]:
        """Checkpoints, newest first, of OUTPUT and then of the mirror, with their manifest or what is wrong with it,
        and whether they are in the mirror; and what the user should know. Collective. Errors: `RunError`."""
        here = [(path.name, manifest, False) for path, manifest in candidates(self.run)] if self.world.is_main else []
        here = self.world.broadcast(here)
        if self.run.remote_dir is None:
            return here, []
        there, fault = self._by_main(lambda: self.mirror.list_checkpoints() if self.mirror else [])
        if fault is not None and not here:
            raise RunError(f"remote_dir: {fault}; without it nobody can tell whether there are checkpoints")
        notes = [f"{fault}; only the checkpoints in {folder_of(self.run)} are looked at"] if fault else []
        every = here + [(name, manifest, True) for name, manifest in there or []]
        return sorted(every, key=lambda each: (-len(each[0]), *(-ord(c) for c in each[0]))), notes

    def left(self, step: int) -> tuple[int | None, float | None, dict[str, str]]:
        """After the loss of a rank, on what is rank 0 now: what was half done is cleared away. Returns the step of the
        newest checkpoint of at most `step` updates, the highest score that is kept, and the run ids of trackers."""
        clear_away(self.run)
        there = [manifest for _, manifest in newest_first(self.run) if manifest.step <= step]
        best = best_first(self.run, {manifest.step: manifest.scores for manifest in there})
        if not there:
            return None, None, {}
        return there[0].step, best[0].score if best else None, there[0].trackers

    def fetched(self, name: str, manifest: Manifest | str, away: bool) -> str | None:
        """See that a checkpoint is in OUTPUT. Returns why it cannot be. Collective. Errors: `RunError`."""
        if not away:
            return None
        reason, fault = self._by_main(lambda: self.mirror.fetch(self.prepared, name, manifest) if self.mirror else None)
        return reason or fault

    def _by_main(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run `work` on rank 0 and broadcast its result or error, however long that takes. Collective. Errors:
        `RunError`, the same on every rank."""
        from lockstep.checkpoint.storage import Background

        task = Background(work if self.world.is_main else lambda: None)
        while self.world.all_reduce_max(int(not task.done))():
            task.wait(1.0)  # shorter than a collective may take
        refused = isinstance(task.error, RunError)
        said = str(task.error) if refused else reason_of(task.error)
        result, said, refused = self.world.broadcast((task.result, said, refused))
        if refused:
            raise RunError(said)
        return result, said

    def rest(self, seconds: float) -> str | None:
        """At a stop: wait for what is being copied into the mirror, at most so long. Returns why the newest checkpoint
        is not there, on rank 0. Collective."""
        if self.run.remote_dir is None:
            return None
        until = time.monotonic() + seconds
        while self.world.all_reduce_max(
            int(self.mirror is not None and self.mirror.busy and time.monotonic() < until)
        )():
            ACTIVITY.at(f"waiting for the copy in {self.run.remote_dir}")
            time.sleep(0.2)
        if self.mirror is None:
            return None
        self.mirror.tell()
        return self.mirror.missing()
