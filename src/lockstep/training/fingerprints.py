"""`OUTPUT/fingerprints.jsonl`: a record of every step at the level `losses`, so that runs can be compared step by step.

In: the result of every step and, occasionally, the state after it. Out: one line per step with loss and gradient norm
in full and a hash of their bits; if the state was hashed, also `weights` and `optimizer`. Bitwise equal runs have equal
lines, whatever the number of processes. Values on a device are read when the log synchronizes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checkpoint.shard_files import StateHash
from lockstep.data.batch import StepResult
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.track.history import lines_of
from lockstep.track.jsonl import Lines

if TYPE_CHECKING:
    from lockstep.training.step_record import StepRecord

FILE = "fingerprints.jsonl"
KEYS = ("step", "loss", "grad_norm", "hash", "weights", "optimizer")  # of a line
_MOST = 1000  # maximum steps whose results are not read yet

# Step, loss and gradient norm (may still be on the device), hashes of the state if computed.
Entry = tuple[int, Tensor | float, Tensor | float, dict[str, str]]


class Fingerprints:
    """Fingerprints of one run, from `after` updates on. The first new line removes lines of later steps."""

    def __init__(self, world: World | None = None, folder: Path | None = None, after: int = 0) -> None:
        """`folder`: OUTPUT. Without arguments, nothing is written or hashed."""
        self._hash = StateHash(world) if world is not None else None
        self._lines = (
            Lines(folder / FILE, after) if folder is not None and world is not None and world.is_main else None
        )
        self._waiting: list[Entry] = []
        self._written: list[Entry] = []  # last entries written; a failed rank may not have written them
        self._folder = folder

    def regroup(self, world: World, step: int, back: bool = False) -> None:
        """Adapt to a new set of ranks after `step` updates; another rank may write from now on. `back`: recovery went
        back some updates."""
        if self._hash is not None:
            self._hash = StateHash(world)
        if back and self._lines is not None:
            with suppress(OSError):
                self._lines.close()
            self._lines = None
        if self._folder is not None and self._lines is None and world.is_main:
            self._lines = Lines(self._folder / FILE, step)
            self._waiting = self._written + self._waiting  # lines already in the file are skipped

    def state_dict(self) -> dict[str, Any]:
        """Return unwritten entries and the last written ones as plain data. Synchronizes with the device."""
        entries_of = {"written": self._written, "waiting": self._waiting}
        return {
            name: [(step, float(loss), float(norm), dict(state)) for step, loss, norm, state in entries]
            for name, entries in entries_of.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load another rank's `state_dict`."""
        self._written = [(*numbers, dict(hashes)) for *numbers, hashes in state["written"]]
        self._waiting = [(*numbers, dict(hashes)) for *numbers, hashes in state["waiting"]]

    def step(self, step: int, result: StepResult) -> None:
        """Record the result of the step that completes update number `step`."""
        if self._hash is not None:
            self._waiting.append((step, result.loss, result.grad_norm, {}))
            if len(self._waiting) >= _MOST:
                self.write()

    def state(self, strategy: Strategy) -> None:
        """Hash the state after the last recorded step. Collective; synchronizes with the device."""
        lines = self._waiting or self._written  # _written: a repetition after a rank failure
        if self._hash is not None and lines:
            step, loss, norm, _ = lines[-1]
            lines[-1] = (step, loss, norm, dict(self._hash.of(strategy.state.sharded_state_dict())))
            self.write()

    def write(self) -> None:
        """Write the lines of the recorded steps. Synchronizes with the device."""
        from lockstep.training.step_record import StepRecord

        waiting, self._waiting = self._waiting, []
        self._written = waiting or self._written
        for step, loss, norm, state in waiting:
            if self._lines is not None:
                with suppress(OSError):  # kept, and retried with the next line
                    self._lines.add(StepRecord.of_numbers(step, float(loss), float(norm), **state).to_json())

    def close(self) -> None:
        with suppress(OSError, RuntimeError):  # after a failure the device may be unreadable
            self.write()
            if self._lines is not None:
                self._lines.close()


def recorded(output: Path) -> list[StepRecord]:
    """Return the records of the steps of OUTPUT, complete lines only; empty without the file."""
    from lockstep.training.step_record import StepRecord

    lines = lines_of(output / FILE, ("step", "hash"))
    return [StepRecord.from_json({name: line.get(name) for name in KEYS}) for line in lines]
