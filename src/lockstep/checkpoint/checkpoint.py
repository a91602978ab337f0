"""Checkpoints: written beside training, aside, synced and renamed; verified before they are loaded.

In: a strategy's `sharded_state_dict`, under the task's own names. Out: `OUTPUT/checkpoints/step-NNNNNN/`, a safetensors
file a rank and a manifest, the same for every strategy and number of processes; nothing in it is pickled.

A step waits for the copy into a buffer. Hashing and writing go on in a thread of each rank, without a collective;
at the step boundaries all ranks agree on when all are done, then rank 0 writes the manifest and renames.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.exported import clear
from lockstep.checkpoint.folder import DiskSpace, clear_away
from lockstep.checkpoint.manifest import (
    Manifest,
    best_first,
    check_resumable,
    finished,
    folder_of,
    name_of,
    newest_first,
    score_of,
)
from lockstep.checkpoint.remote_sync import CheckpointCatalog, reason_of
from lockstep.config.errors import CodedError
from lockstep.config.run import Run, RunError
from lockstep.data.arrow_cache import Prepared
from lockstep.distributed.event_log import launched_by

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Background, Shard
    from lockstep.distributed.sharded import Saved, ShardedState
    from lockstep.distributed.world import World

__all__ = ["CheckpointError", "Checkpoints", "check_resumable", "finished", "folder_of", "newest_first"]


class CheckpointError(CodedError):
    """A checkpoint could not be written and the run is to stop then: one message, the same on every rank."""


class Loads(Protocol):
    """The interface of an object that takes over the state that a checkpoint has beside tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`step`, `meter`, `progress` and `pending`, as they were given to `Checkpoints.save`."""


@dataclass
class _Saving:
    """The save in flight."""

    manifest: Manifest
    aside: Path
    work: Background  # this rank's part of the phase
    answer: Callable[[], int] | None = None  # whether any rank was still at it a step ago
    committing: bool = False  # every file is written; rank 0 is renaming


class Checkpoints:
    """Saves and restores one run. `say` tells the user; it is called on rank 0."""

    def __init__(
        self,
        run: Run,
        world: World,
        prepared: Prepared,
        steps: int,
        say: Callable[[str], None] = lambda text: None,
        every: int = 0,  # steps between checkpoints; `steps` are those of the whole run
    ) -> None:
        self.run, self.world, self.prepared, self.say = run, world, prepared, say
        self.steps, self.every, self.folder = steps, every, folder_of(run)
        self.code = manifests.code_of(run)  # when this process started
        self.trackers: dict[str, str] = {}  # run ids by tracker, which travel in the manifest
        self.newest: int | None = None  # step of the last one that was written or resumed from
        self.best: float | None = None  # the highest score of `checkpoint.best` that is kept
        self._shard: Shard | None = None
        self._saving: _Saving | None = None
        self._sees: bool | None = None  # whether this rank's OUTPUT is that of rank 0
        self.catalog = CheckpointCatalog(run, world, prepared, say)
        self.mirror = self.catalog.mirror  # on rank 0, of a run that has one
        self.room = DiskSpace(run)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        strategy: ShardedState,
        scores: Mapping[str, float] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to write the state after `step` updates; waits for the save before. `scores` are those of the
        evaluation after this step, `state` is what `restore` is to give back (a `TrainState.state_dict`). Collective.
        Errors: `CheckpointError`, if the run is to stop at a failure."""
        from lockstep.checkpoint.storage import Background

        self.settle()
        parts = strategy.sharded_state_dict()
        if faults := self._lay_out(parts):
            self._failed(step, faults)
            return
        assert self._shard is not None
        self._shard.fill(parts)
        state = state or {}
        manifest = Manifest(
            step=step,
            steps=self.steps,
            arithmetic=self.run.arithmetic(),
            data=self.prepared.key,
            strategy=self.run.strategy.name,
            world_size=self.world.size,
            hosts=self.world.hosts,
            launch=launched_by(self.run),
            code=self.code,
            bits=strategy.gives_bits(self.run),
            scores={name: float(value) for name, value in (scores or {}).items()},
            trackers=dict(self.trackers),  # a tracker's thread may add to it
            meter=state.get("meter", {}),
            progress=state.get("progress", {}),
            pending=state.get("pending", []),
            every=self.every if self.run.average.last is not None else 0,
            **manifests.facts_of(self.world),
        )
        shard, aside = self._shard, self.folder / f".{name_of(step)}.partial"
        self._saving = _Saving(manifest, aside, Background(lambda: shard.write(aside)))

    def dry_run(self, strategy: ShardedState) -> None:
        """Take and fill the buffer of this rank's file, while there is a state of the optimizer: memory that does not
        suffice for it is found before the first step. Collective. Errors: `RunError`, on every rank, if the run is to
        stop at a failure."""
        parts = strategy.sharded_state_dict()
        if faults := self._lay_out(parts):
            text = f"no checkpoint can be written: {'; '.join(faults)}"
            if self.run.checkpoint.on_failure == "stop":
                raise RunError("LS6000", f"{text} (checkpoint.on_failure: stop)")
            if self.world.is_main:
                self.say(f"{text}. Each save tries again")
        elif self._shard is not None:
            self._shard.fill(parts)

    def _lay_out(self, parts: dict[str, Tensor]) -> list[str]:
        """See that there is a buffer for these parts. Returns what went wrong, and where. Collective."""
        from lockstep.checkpoint.storage import Shard

        laid_out = self.world.all_gather(
            (self.room.checkpoints_away(), self._shard is None or not self._shard.suits(parts))
        )
        if (away := laid_out[0][0]) is not None or not any(new for _, new in laid_out):
            return [away] if away else []
        self._shard, reason = None, None
        try:
            self._shard = Shard(parts, self.world, self._writes())
        except (OSError, MemoryError, RuntimeError) as caught:
            reason = reason_of(caught)
        outcomes = self.world.all_gather((reason, self.world.host, self._shard.bytes if self._shard else 0))
        faults = [f"rank {i} on {host}: {reason}" for i, (reason, host, _) in enumerate(outcomes) if reason]
        self.room.checkpoint = sum(count for *_, count in outcomes)
        if faults:
            self._shard = None
        return faults

    def advance(self) -> None:
        """Continue a save at the end of a step: once all ranks have written their files, commit it. Does not wait for a
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
        """Wait until nothing is in flight. Collective. Errors: as `save`."""
        while self._saving is not None:
            self._saving.work.wait(1.0)  # shorter than a collective may take, however slow the disk is
            self.advance()

    def regroup(self, step: int) -> bool:
        """Other ranks are left, after `step` updates, and another one may be rank 0. Returns whether a save was broken
        off, and one of this step is owed for it. Collective. Errors: `CheckpointError`, where none can be made."""
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
        """Put the scores of an evaluation that was made up for, and the state after it, into the checkpoint that the
        run goes on from. Where that cannot be written, the next start evaluates again."""
        assert self.newest is not None
        if self.world.is_main and self.room.checkpoints_away() is None:
            with suppress(OSError):
                manifests.add_scores(self.folder / name_of(self.newest), scores, state)
        self._heed(scores)

    def is_best(self, scores: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far by `checkpoint.best`. The same on every rank, as the scores are.
        Errors: `RunError` when there is no such score."""
        score = score_of(self.run, scores)
        if self.run.checkpoint.best and self.run.checkpoint.best.removeprefix("-") not in scores:
            raise RunError(
                "LS6002",
                f"checkpoint.best: {self.run.checkpoint.best!r} is not a metric of this task; expected one of "
                f"{', '.join(sorted(scores))} (with a minus if lower is better)",
            )
        return score is not None and (self.best is None or score > self.best)

    def _heed(self, scores: Mapping[str, float]) -> None:
        score = score_of(self.run, scores)
        if score is not None and (self.best is None or score > self.best):
            self.best = score

    def _written(self, saving: _Saving) -> None:
        """Every rank is done with its file, or has failed."""
        from lockstep.checkpoint.storage import Background

        outcomes = self.world.all_gather((saving.work.result, reason_of(saving.work.error), self.world.host))
        faults = [f"rank {i} on {host}: {reason}" for i, (_, reason, host) in enumerate(outcomes) if reason]
        if faults:
            self._failed(saving.manifest.step, faults)
            return
        files = [written for written, _, _ in outcomes if written is not None]
        manifest = replace(saving.manifest, hashes={file.name: file.sha256 for file in files})
        main = self.world.is_main
        in_use = self.mirror.in_use if self.mirror else ()
        saving.work = Background(lambda: self.room.commit(manifest, saving.aside, files, in_use) if main else None)
        saving.answer, saving.committing = None, True

    def _committed(self, saving: _Saving) -> None:
        reason = self.world.broadcast(reason_of(saving.work.error))
        if reason is not None:
            self._failed(saving.manifest.step, [f"rank 0: {reason}"])
            return
        if saving.work.result:  # of rank 0
            self.say(saving.work.result)
        self._saving, self.newest = None, saving.manifest.step
        self._heed(saving.manifest.scores)
        if self.mirror is not None:
            self.mirror.offer()

    def _failed(self, step: int, faults: list[str]) -> None:
        """Nothing is left of a failed save; the older checkpoint stays. The same on every rank."""
        self._saving = None
        older = f"the newest one is {name_of(self.newest)}" if self.newest else "there is none yet to go on from"
        text = f"the checkpoint of step {step} could not be written ({'; '.join(faults)}); {older}"
        if self.world.is_main and self.room.checkpoints_away() is None:
            clear(self.folder / f".{name_of(step)}.partial")
        if self.run.checkpoint.on_failure == "stop":
            raise CheckpointError("LS6004", text)
        if self.world.is_main:
            self.say(text)
            if (cleared := self.clear(step == self.steps)) is not None:
                self.say(cleared)

    def clear(self, last: bool = True) -> str | None:
        """Rank 0: remove older checkpoints where the disk has no room for what comes next; `last`: no checkpoint does.
        Returns what was removed, in words."""
        return self.room.clear(last, self.mirror.in_use if self.mirror else ())

    def _writes(self) -> bool:
        """Whether this rank's OUTPUT is that of rank 0. Asked once. Collective."""
        if self._sees is None:
            name, is_writable = f".probe-{secrets.token_hex(8)}", True
            if self.world.is_main:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    (self.folder / name).touch()
                except OSError:
                    is_writable = False  # no rank will be able to write, and each reports why
            name, is_writable = self.world.broadcast((name, is_writable))
            self._sees = not is_writable or (self.folder / name).exists()
            self.world.barrier()
            if self.world.is_main and is_writable:
                with suppress(OSError):
                    (self.folder / name).unlink()
        return self._sees

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, strategy: ShardedState, state: Loads | None = None) -> tuple[int, list[str]]:
        """Load the newest checkpoint that verifies, also into `state`. Returns updates done (0: there is no checkpoint)
        and what the user should know. Collective. Errors: `RunError`, on every rank, where there are checkpoints and
        none verifies."""
        checkpoints, notes = self.catalog.list_checkpoints()
        faults = list[str]()
        for name, manifest, away in checkpoints:
            where = f"{name} in {self.run.remote_dir}" if away else name
            if (fault := self._loaded(strategy, name, manifest, away)) is not None:
                faults.append(f"{where}: {fault}")
                notes.append(f"{where} is damaged ({fault}) and is not used")
                continue
            assert isinstance(manifest, Manifest)
            if self.world.is_main:
                clear_away(self.run)
            self.newest = manifest.step
            self.trackers.update(manifest.trackers)
            if state is not None:
                state.load_state_dict(manifest.train_state)
            before = {
                m.step: m.scores for _, m, _ in checkpoints if isinstance(m, Manifest) and m.step <= manifest.step
            }
            self.best = next((best.score for best in best_first(self.run, before)), None)
            notes += [f"{where} was downloaded, and verified"] if away else []
            notes += manifests.differences(self.run, self.world, name, manifest, strategy.gives_bits(self.run))
            return manifest.step, notes
        if faults:
            raise manifests.none_usable(self.run, faults)
        if self.world.is_main:
            clear_away(self.run)
        return 0, notes

    def take_before(self, strategy: ShardedState, most: int) -> tuple[int, list[str]]:
        """Load the newest checkpoint of at most so many updates that verifies; every rank must see the folder, in which
        nothing is written. Returns its step (0: there is none) and what the user should know. Collective."""
        self._sees = True
        every = manifests.candidates(self.run) if self.world.is_main else ()
        here = [(path, each) for path, each in every if not (n := path.name[5:]).isdigit() or int(n) <= most]
        notes = [f"{path.name} is not used: {each}" for path, each in here if isinstance(each, str)]
        checkpoints = [(path.name, each) for path, each in here if isinstance(each, Manifest)]
        for name, manifest in self.world.broadcast(checkpoints):
            if (fault := self._loaded(strategy, name, manifest)) is None:
                return manifest.step, notes + manifests.differences(
                    self.run, self.world, name, manifest, strategy.gives_bits(self.run)
                )
            notes.append(f"{name} is not used: {fault}")
        return 0, notes

    def take_best(self, strategy: ShardedState, step: int, last: float | None) -> tuple[int, list[str]]:
        """Load the best evaluated checkpoint, if one is better than the state after `step`, whose score is `last`.
        Returns the step of what is loaded now (`step`: nothing was, the last is as good) and what the user should know.
        Collective."""
        every, notes = self.catalog.list_checkpoints()
        places: dict[int, list[tuple[Manifest, bool]]] = {}  # step -> in OUTPUT, in the mirror
        for _, manifest, away in every:
            if isinstance(manifest, Manifest) and manifest.step <= step:
                places.setdefault(manifest.step, []).append((manifest, away))
        for best in best_first(self.run, {s: there[0][0].scores for s, there in places.items()}):
            if best.step == step or (last is not None and best.score < last):
                break
            name = name_of(best.step)
            for manifest, away in places[best.step]:
                if (fault := self._loaded(strategy, name, manifest, away)) is None:
                    return best.step, notes
                notes.append(f"{name}, the best one, is damaged ({fault}) and is not used")
        return step, notes

    def take_mean(self, strategy: ShardedState, step: int) -> list[int]:
        """Load the mean of the weights of the last checkpoints, as `average.last` says, that of `step` among them.
        Returns their steps. Collective. Errors: `CheckpointError`, on every rank, where one of them cannot be read."""
        from lockstep.checkpoint.storage import Mean

        steps, saved = manifests.averaged(self.run, step, self.every), []
        every, _ = self.catalog.list_checkpoints()
        for name in map(name_of, steps):
            fault: str | None = "it is not there"
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
        strategy.load_sharded_state_dict(Mean(saved))
        return steps

    def _loaded(self, strategy: ShardedState, name: str, manifest: Manifest | str, away: bool = False) -> str | None:
        """Take up a checkpoint, of the mirror if it is `away`. Returns why it was not, or None. Collective. Errors:
        `RunError`."""
        if (fault := self.catalog.fetched(name, manifest, away) or self._fault(name, manifest)) is None:
            assert isinstance(manifest, Manifest)
            strategy.load_sharded_state_dict(self._open(self.folder / name, manifest))
        return fault

    def _open(self, path: Path, manifest: Manifest) -> Saved:
        from lockstep.checkpoint.storage import Files, FromMain

        if all(self.world.all_gather(self._writes())):
            return Files(path, manifest.hashes)
        return FromMain(Files(path, manifest.hashes) if self.world.is_main else None, self.world)

    def _fault(self, name: str, manifest: Manifest | str) -> str | None:
        """Why a checkpoint is not used, or None. Ranks share the reading; all come to the same conclusion.
        Collective."""
        path = self.folder / name
        if isinstance(manifest, str):
            return manifest
        fault = None
        if self.world.is_main:
            fault = manifests.misfit(path, manifest)
            if fault is None and manifests.changed(self.run, self.prepared, manifest):
                fault = "it is of another run"
        if (fault := self.world.broadcast(fault)) is not None:
            return fault
        readers = [rank for rank, sees in enumerate(self.world.all_gather(self._writes())) if sees]
        mine = []
        if self.world.rank in readers:
            mine = sorted(manifest.hashes)[readers.index(self.world.rank) :: len(readers)]
        return next((fault for fault in self.world.all_gather(manifests.mismatch(path, manifest, mine)) if fault), None)
