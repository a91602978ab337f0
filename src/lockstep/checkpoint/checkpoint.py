"""Save and resume checkpoints: written in the background, synced, renamed into place, and verified before loading.

In: a strategy's `sharded_state_dict`, keyed by the task's parameter names. Out: `OUTPUT/checkpoints/step-NNNNNN/` with
one safetensors file per rank and a manifest. The format is the same for every strategy and world size; nothing is
pickled.

A training step waits only for the copy into a buffer. A thread on each rank hashes and writes the buffer, without
collectives. At step boundaries the ranks check whether all have finished; then rank 0 writes the manifest and renames
the folder (`folder.py`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.folder import DiskSpace, clear_away
from lockstep.checkpoint.manifest import (
    Manifest,
    best_first,
    candidates,
    check_resumable,
    folder_of,
    name_of,
    newest_first,
    score_of,
    unknown_metric,
)
from lockstep.config.errors import CodedError
from lockstep.config.lazy import lazy
from lockstep.config.output_files import clear
from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.event_log import launched_by
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint import remote_sync, shard_files
    from lockstep.checkpoint.shard_files import Background, Shard
    from lockstep.data import object_store
    from lockstep.distributed.sharded import Saved, ShardedState
    from lockstep.distributed.world import World
else:  # for a mirror; with torch
    remote_sync, shard_files = lazy("lockstep.checkpoint", "remote_sync", "shard_files")
    (object_store,) = lazy("lockstep.data", "object_store")

__all__ = ["CheckpointError", "Checkpoints", "check_resumable", "folder_of", "newest_first"]


class CheckpointError(CodedError):
    """A checkpoint could not be written and the run must stop. Raised with one message on every rank."""


class Loads(Protocol):
    """Interface of an object that restores the non-tensor state of a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `step`, `meter`, `progress` and `pending`, as passed to `Checkpoints.save`."""


@dataclass
class _Saving:
    """The save in flight."""

    manifest: Manifest
    aside: Path
    work: Background  # this rank's work in the current phase
    answer: Callable[[], int] | None = None  # number of ranks that were still working one step ago
    committing: bool = False  # every file is written; rank 0 is renaming


class Checkpoints:
    """Save and restore one run. `say` prints a message for the user; it is called on rank 0."""

    def __init__(
        self,
        job: Job,
        world: World,
        steps: int,
        say: Callable[[str], None] = lambda text: None,
        every: int = 0,  # steps between checkpoints; `steps` is the total of the run
    ) -> None:
        self.job, self.run, self.world, self.say = job, job.run, world, say
        self.steps, self.every, self.folder = steps, every, folder_of(job.run.folder)
        self.code = manifests.code_of(job.run.task, job.run.optim, job.run.strategy)  # as of this process's start
        self.trackers: dict[str, str] = {}  # tracker -> run id, stored in the manifest
        self.newest: int | None = None  # step of the last checkpoint written or resumed from
        self.best: float | None = None  # highest `checkpoint.best` score among kept checkpoints
        self._shard: Shard | None = None
        self._saving: _Saving | None = None
        self._sees: bool | None = None  # whether this rank sees rank 0's OUTPUT
        self.catalog = CheckpointCatalog(job, world, say)
        self.mirror = self.catalog.mirror  # on rank 0, if the run has a mirror
        self.disk = DiskSpace(job)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        sharded: ShardedState,
        scores: Mapping[str, float] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start writing the state after `step` updates; first waits for the previous save to finish. `scores`: the
        evaluation after this step. `state`: the `TrainState.state_dict` that `resume` restores. Collective. Errors:
        `CheckpointError`, if checkpoint.on_failure is `stop`."""
        self.settle()
        parts = sharded.sharded_state_dict()
        if faults := self._lay_out(parts):
            self._failed(step, faults)
            return
        assert self._shard is not None
        self._shard.fill(parts)
        state = state or {}
        manifest = Manifest(
            step=step,
            steps=self.steps,
            arithmetic=self.job.arithmetic(),
            data=self.job.data.key,
            strategy=self.run.strategy.name,
            world_size=self.world.size,
            hosts=self.world.hosts,
            launch=launched_by(self.run.launch),
            code=self.code,
            bits=self.job.same_bits,
            scores={name: float(value) for name, value in (scores or {}).items()},
            trackers=dict(self.trackers),  # copied: a tracker's thread may add to it
            meter=state.get("meter", {}),
            progress=state.get("progress", {}),
            pending=state.get("pending", []),
            every=self.every if self.run.average.last is not None else 0,
            **manifests.facts_of(self.world),
        )
        shard, aside = self._shard, self.folder / f".{name_of(step)}.partial"
        self._saving = _Saving(manifest, aside, shard_files.Background(lambda: shard.write(aside)))

    def dry_run(self, sharded: ShardedState) -> None:
        """Allocate and fill this rank's buffer while optimizer state exists, so that a lack of memory shows before the
        first step. Collective. Errors: `RunError`, on every rank, if checkpoint.on_failure is `stop`."""
        parts = sharded.sharded_state_dict()
        if faults := self._lay_out(parts):
            text = f"no checkpoint can be written: {'; '.join(faults)}"
            if self.run.checkpoint.on_failure == "stop":
                raise RunError("LS6000", f"{text} (checkpoint.on_failure: stop)")
            if self.world.is_main:
                self.say(f"{text}. Each save will try again")
        elif self._shard is not None:
            self._shard.fill(parts)

    def _lay_out(self, parts: dict[str, Tensor]) -> list[str]:
        """Allocate a buffer for these parts unless the present one fits. Returns failures, with rank and host.
        Collective."""
        laid_out = self.world.all_gather(
            (self.disk.checkpoints_away(), self._shard is None or not self._shard.suits(parts))
        )
        if (away := laid_out[0][0]) is not None or not any(new for _, new in laid_out):
            return [away] if away else []
        self._shard, reason = None, None
        try:
            self._shard = shard_files.Shard(parts, self.world, self._writes())
        except (OSError, MemoryError, RuntimeError) as caught:
            reason = reason_of(caught)
        outcomes = self.world.all_gather((reason, self.world.host, self._shard.bytes if self._shard else 0))
        faults = [f"rank {i} on {host}: {reason}" for i, (reason, host, _) in enumerate(outcomes) if reason]
        self.disk.checkpoint = sum(count for *_, count in outcomes)
        if faults:
            self._shard = None
        return faults

    def advance(self) -> None:
        """Advance a save at the end of a step: once all ranks have written their files, commit it. Does not wait for a
        rank that is still writing. Collective. Errors: as `save`."""
        if self.mirror is not None:
            self.mirror.tell()
        if (saving := self._saving) is None:
            return
        if saving.answer is None or saving.answer():
            saving.answer = self.world.all_reduce_max(int(not saving.work.done))
        elif saving.committing:
            self._committed(saving)
        else:
            self._written(saving)

    def settle(self) -> None:
        """Wait for the save in flight, if any. Collective. Errors: as `save`."""
        while self._saving is not None:
            self._saving.work.wait(1.0)  # shorter than a collective's timeout, even if the disk is slow
            self.advance()

    def regroup(self, step: int) -> bool:
        """Adapt to a new set of ranks after `step` updates; rank 0 may be a different process. Returns whether a save
        was interrupted and a checkpoint of this step must replace it. Collective. Errors: `CheckpointError`, if the
        interrupted checkpoint is needed and cannot be replaced."""
        saving, self._saving, self._shard, self._sees = self._saving, None, None, None
        if saving is not None:
            saving.work.wait()
        broken = max((each for each in self.world.all_gather(saving and saving.manifest.step) if each), default=0)
        self.newest, self.best, trackers = self.world.broadcast(self.catalog.left(step) if self.world.is_main else None)
        self.trackers = trackers | self.trackers
        owed = broken > (self.newest or 0)
        if owed and broken < step and (self.run.checkpoint.best or self.run.average.last is not None):
            raise CheckpointError(
                "LS6001",
                f"the checkpoint of step {broken} is incomplete because a rank failed while it was written, and "
                "it is needed",
            )
        return owed

    def add_scores(self, scores: Mapping[str, float], state: Mapping[str, Any]) -> None:
        """Add the scores of a late evaluation, and the state after it, to the checkpoint that the run resumes from. If
        writing fails, the next start evaluates again."""
        assert self.newest is not None
        if self.world.is_main and self.disk.checkpoints_away() is None:
            with suppress(OSError):
                manifests.add_scores(self.folder / name_of(self.newest), scores, state)
        self._heed(scores)

    def is_best(self, scores: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far by `checkpoint.best`. Equal on every rank, because the scores are.
        Errors: `RunError`, if the scores lack that metric."""
        score = score_of(self.run.checkpoint.best, scores)
        if self.run.checkpoint.best and self.run.checkpoint.best.removeprefix("-") not in scores:
            raise unknown_metric(self.run.checkpoint.best, scores)
        return score is not None and (self.best is None or score > self.best)

    def _heed(self, scores: Mapping[str, float]) -> None:
        score = score_of(self.run.checkpoint.best, scores)
        if score is not None and (self.best is None or score > self.best):
            self.best = score

    def _written(self, saving: _Saving) -> None:
        """Collect the results once every rank has written its file or failed, and start the commit."""
        outcomes = self.world.all_gather((saving.work.result, reason_of(saving.work.error), self.world.host))
        faults = [f"rank {i} on {host}: {reason}" for i, (_, reason, host) in enumerate(outcomes) if reason]
        if faults:
            self._failed(saving.manifest.step, faults)
            return
        files = [written for written, _, _ in outcomes if written is not None]
        manifest = replace(saving.manifest, hashes={file.name: file.sha256 for file in files})
        main = self.world.is_main
        in_use = self.mirror.in_use if self.mirror else ()
        saving.work = shard_files.Background(
            lambda: self.disk.commit(manifest, saving.aside, files, in_use) if main else None
        )
        saving.answer, saving.committing = None, True

    def _committed(self, saving: _Saving) -> None:
        reason = self.world.broadcast(reason_of(saving.work.error))
        if reason is not None:
            self._failed(saving.manifest.step, [f"rank 0: {reason}"])
            return
        if saving.work.result:  # on rank 0
            self.say(saving.work.result)
        self._saving, self.newest = None, saving.manifest.step
        self._heed(saving.manifest.scores)
        if self.mirror is not None:
            self.mirror.offer()

    def _failed(self, step: int, faults: list[str]) -> None:
        """Discard a failed save on every rank; the older checkpoint stays. Errors: `CheckpointError`, if
        checkpoint.on_failure is `stop`."""
        self._saving = None
        older = f"the newest one is {name_of(self.newest)}" if self.newest else "there is no earlier checkpoint"
        text = f"the checkpoint of step {step} could not be written ({'; '.join(faults)}); {older}"
        if self.world.is_main and self.disk.checkpoints_away() is None:
            clear(self.folder / f".{name_of(step)}.partial")
        if self.run.checkpoint.on_failure == "stop":
            raise CheckpointError("LS6004", text)
        if self.world.is_main:
            self.say(text)
            if (cleared := self.clear(step == self.steps)) is not None:
                self.say(cleared)

    def clear(self, last: bool = True) -> str | None:
        """Remove older checkpoints if the disk lacks space for the next writes. Rank 0 only. `last`: no further
        checkpoint will be written. Returns a message about the removed checkpoints, or None."""
        return self.disk.clear(last, self.mirror.in_use if self.mirror else ())

    def _writes(self) -> bool:
        """Return whether this rank sees rank 0's OUTPUT. Tested once, with a probe file. Collective."""
        if self._sees is None:
            name, is_writable = f".probe-{secrets.token_hex(8)}", True
            if self.world.is_main:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    for left in self.folder.glob(".probe-*"):  # by a run that was killed
                        left.unlink()
                    (self.folder / name).touch()
                except OSError:
                    is_writable = False  # no rank can write; each reports the reason later
            name, is_writable = self.world.broadcast((name, is_writable))
            self._sees = not is_writable or (self.folder / name).exists()
            self.world.barrier()
            if self.world.is_main and is_writable:
                with suppress(OSError):
                    (self.folder / name).unlink()
        return self._sees

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, sharded: ShardedState, state: Loads | None = None) -> tuple[int, list[str]]:
        """Load the newest checkpoint that passes verification, and its training state into `state`. Returns the number
        of updates done (0: there is no checkpoint) and notes for the user. Collective. Errors: `RunError`, on every
        rank, if checkpoints exist and none passes."""
        checkpoints, notes = self.catalog.list_checkpoints()
        faults = list[str]()
        for name, manifest, away in checkpoints:
            where = f"{name} in {self.run.remote_dir}" if away else name
            if (fault := self._loaded(sharded, name, manifest, away)) is not None:
                faults.append(f"{where}: {fault}")
                notes.append(f"{where} is damaged ({fault}) and is not used")
                continue
            assert isinstance(manifest, Manifest)
            if self.world.is_main:
                clear_away(self.run.folder)
            self.newest = manifest.step
            self.trackers.update(manifest.trackers)
            if state is not None:
                state.load_state_dict(manifest.train_state)
            before = {
                m.step: m.scores for _, m, _ in checkpoints if isinstance(m, Manifest) and m.step <= manifest.step
            }
            self.best = next((best.score for best in best_first(self.run.checkpoint.best, before)), None)
            notes += [f"{where} was downloaded and verified"] if away else []
            notes += manifests.differences_of_saving_run(self.job, self.world, name, manifest)
            return manifest.step, notes
        if faults:
            raise manifests.none_usable(self.run.folder, self.run.remote_dir, faults)
        if self.world.is_main:
            if (metrics := self.run.folder / "metrics.jsonl").is_file() and metrics.stat().st_size:
                notes.append(f"{self.run.folder} has no checkpoint yet, so training starts again from step 0")
            clear_away(self.run.folder)
        return 0, notes

    def take_before(self, sharded: ShardedState, most: int) -> tuple[int, list[str]]:
        """Load the newest verified checkpoint of at most `most` updates. Every rank must see the folder; nothing is
        written to it. Returns its step (0: no such checkpoint) and notes for the user. Collective."""
        self._sees = True
        every = tuple(manifests.candidates(self.run.folder)) if self.world.is_main else ()
        here = [(path, each) for path, each in every if not (n := path.name[5:]).isdigit() or int(n) <= most]
        notes = [f"{path.name} is not used: {each}" for path, each in here if isinstance(each, str)]
        checkpoints = [(path.name, each) for path, each in here if isinstance(each, Manifest)]
        for name, manifest in self.world.broadcast(checkpoints):
            if (fault := self._loaded(sharded, name, manifest)) is None:
                return manifest.step, notes + manifests.differences_of_saving_run(self.job, self.world, name, manifest)
            notes.append(f"{name} is not used: {fault}")
        later = [(path.name, each) for path, each in every if isinstance(each, Manifest)]
        for name, manifest in self.world.broadcast(later)[:1]:  # says where the run was trained
            notes += manifests.differences_of_saving_run(self.job, self.world, name, manifest)
        return 0, notes

    def take_best(self, sharded: ShardedState, step: int, last: float | None) -> tuple[int, list[str]]:
        """Load the best evaluated checkpoint if it beats the state after `step`, whose score is `last`. Returns the
        step of the weights now in use (`step` if nothing was loaded) and notes for the user. Collective."""
        every, notes = self.catalog.list_checkpoints()
        places: dict[int, list[tuple[Manifest, bool]]] = {}  # step -> (manifest, whether in the mirror) of each copy
        for _, manifest, away in every:
            if isinstance(manifest, Manifest) and manifest.step <= step:
                places.setdefault(manifest.step, []).append((manifest, away))
        for best in best_first(self.run.checkpoint.best, {s: there[0][0].scores for s, there in places.items()}):
            if best.step == step or (last is not None and best.score < last):
                break
            name = name_of(best.step)
            for manifest, away in places[best.step]:
                if (fault := self._loaded(sharded, name, manifest, away)) is None:
                    return best.step, notes
                notes.append(f"{name}, the best checkpoint, is damaged ({fault}) and is not used")
        return step, notes

    def take_mean(self, sharded: ShardedState, step: int) -> list[int]:
        """Load the mean of the weights of the last `average.last` checkpoints, including that of `step`. Returns their
        steps. Collective. Errors: `CheckpointError` on every rank, if a checkpoint cannot be read."""
        steps, saved = manifests.averaged(self.run.average.last, step, self.every), []
        every, _ = self.catalog.list_checkpoints()
        for name in map(name_of, steps):
            fault: str | None = "it does not exist"
            for manifest, away in [(manifest, away) for each, manifest, away in every if each == name]:
                if (fault := self.catalog.fetched(name, manifest, away) or self._fault(name, manifest)) is None:
                    assert isinstance(manifest, Manifest)
                    saved.append(self._open(self.folder / name, manifest))
                    break
            if fault is not None:
                raise CheckpointError(
                    "LS6003",
                    f"average.last: it needs the checkpoints of steps {', '.join(map(str, steps))}, and {name} "
                    f"cannot be used: {fault}. Set average.last=null to export the last model",
                )
        sharded.load_sharded_state_dict(shard_files.Mean(saved))
        return steps

    def _loaded(self, sharded: ShardedState, name: str, manifest: Manifest | str, away: bool = False) -> str | None:
        """Load a checkpoint, downloading it from the mirror if it is `away`. Returns the reason if it cannot be loaded,
        else None. Collective. Errors: `RunError`."""
        if (fault := self.catalog.fetched(name, manifest, away) or self._fault(name, manifest)) is None:
            assert isinstance(manifest, Manifest)
            sharded.load_sharded_state_dict(self._open(self.folder / name, manifest))
        return fault

    def _open(self, path: Path, manifest: Manifest) -> Saved:
        if all(self.world.all_gather(self._writes())):
            return shard_files.Files(path, manifest.hashes)
        main = shard_files.Files(path, manifest.hashes) if self.world.is_main else None
        return shard_files.FromMain(main, self.world)

    def _fault(self, name: str, manifest: Manifest | str) -> str | None:
        """Describe the fault of a checkpoint, or return None if it is intact. Ranks divide the reading and all get the
        same answer. Collective."""
        path = self.folder / name
        if isinstance(manifest, str):
            return manifest
        fault = None
        if self.world.is_main:
            fault = manifests.misfit(path, manifest)
            if fault is None and manifests.changed(self.job, manifest):
                fault = "it belongs to another run"
        if (fault := self.world.broadcast(fault)) is not None:
            return fault
        readers = [rank for rank, sees in enumerate(self.world.all_gather(self._writes())) if sees]
        mine = []
        if self.world.rank in readers:
            mine = sorted(manifest.hashes)[readers.index(self.world.rank) :: len(readers)]
        return next((fault for fault in self.world.all_gather(manifests.mismatch(path, manifest, mine)) if fault), None)


def reason_of(error: BaseException | None) -> str | None:
    """Describe an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    if isinstance(error, object_store.StoreError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if error is not None else None


class CheckpointCatalog:
    """Checkpoints that a run can resume from, in OUTPUT and in its mirror, the same for every rank. `say` prints a
    message for the user; it is called on rank 0. Only rank 0 accesses the object store, in a thread, so that no
    collective exceeds its timeout."""

    def __init__(self, job: Job, world: World, say: Callable[[str], None]) -> None:
        self.job, self.run, self.world = job, job.run, world
        self.mirror = remote_sync.RemoteSync(job.run, say) if job.run.remote_dir is not None and world.is_main else None

    def list_checkpoints(self) -> tuple[list[tuple[str, Manifest | str, bool]], list[str]]:
        """List the checkpoints of OUTPUT, then of the mirror, each newest first: (name, manifest or description of its
        fault, whether it is in the mirror). Also returns notes for the user. Collective. Errors: `RunError`."""
        here = (
            [(path.name, manifest, False) for path, manifest in candidates(self.run.folder)]
            if self.world.is_main
            else []
        )
        here = self.world.broadcast(here)
        if self.run.remote_dir is None:
            return here, []
        there, fault = self._by_main(lambda: self.mirror.list_checkpoints() if self.mirror else [])
        if fault is not None and not here:
            raise RunError(
                "LS6040",
                f"remote_dir: {fault}, so the checkpoints there cannot be listed; make it reachable, or remove "
                "remote_dir",
            )
        notes = [f"{fault}; only the checkpoints in {folder_of(self.run.folder)} are considered"] if fault else []
        every = here + [(name, manifest, True) for name, manifest in there or []]
        return sorted(every, key=lambda each: (-len(each[0]), *(-ord(c) for c in each[0]))), notes

    def left(self, step: int) -> tuple[int | None, float | None, dict[str, str]]:
        """Clear incomplete files after a rank failed; called on the new rank 0. Returns the step of the newest
        checkpoint of at most `step` updates, the highest kept score, and the trackers' run ids."""
        clear_away(self.run.folder)
        there = [manifest for _, manifest in newest_first(self.run.folder) if manifest.step <= step]
        best = best_first(self.run.checkpoint.best, {manifest.step: manifest.scores for manifest in there})
        if not there:
            return None, None, {}
        return there[0].step, best[0].score if best else None, there[0].trackers

    def fetched(self, name: str, manifest: Manifest | str, away: bool) -> str | None:
        """Ensure that a checkpoint is in OUTPUT, downloading it if it is `away`. Returns the reason if that fails, else
        None. Collective. Errors: `RunError`."""
        if not away:
            return None
        reason, fault = self._by_main(lambda: self.mirror.fetch(self.job, name, manifest) if self.mirror else None)
        return reason or fault

    def _by_main(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run `work` on rank 0 and broadcast its result or error, however long it takes. Collective. Errors:
        `RunError`, the same on every rank."""
        task = shard_files.Background(work if self.world.is_main else lambda: None)
        while self.world.all_reduce_max(int(not task.done))():
            task.wait(1.0)  # shorter than a collective's timeout
        refused = isinstance(task.error, RunError)
        reason = str(task.error) if refused else reason_of(task.error)
        result, reason, refused = self.world.broadcast((task.result, reason, refused))
        if refused:
            raise RunError.read(reason)
        return result, reason

    def rest(self, seconds: float) -> str | None:
        """Wait up to `seconds`, before a stop, for uploads to finish. Returns, on rank 0, why the newest checkpoint is
        not in the object store, or None. Collective."""
        if self.run.remote_dir is None:
            return None
        until = time.monotonic() + seconds
        while self.world.all_reduce_max(
            int(self.mirror is not None and self.mirror.busy and time.monotonic() < until)
        )():
            ACTIVITY.set(f"waiting for the copy in {self.run.remote_dir}")
            time.sleep(0.2)
        if self.mirror is None:
            return None
        self.mirror.tell()
        return self.mirror.missing()
