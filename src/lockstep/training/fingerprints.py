"""`OUTPUT/fingerprints.jsonl`: what every step came to, in a few digits, so that runs can be compared step by step.

In: the result of every step, and now and then the state after it. Out: a line a step: loss and gradient norm in full,
and the hash of their bits; where the state was hashed, `weights` and `optimizer` beside. Runs of the same bits have the
same lines, whatever the number of processes. What is on a device is read where the log waits for it anyway.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.storage import StateHash
from lockstep.config.run import Run
from lockstep.data.batch import StepResult
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.track.jsonl import Lines

FILE = "fingerprints.jsonl"
_MOST = 1000  # steps whose results wait to be read

# Step, loss and gradient norm (maybe still on the device), and hashes of the state where it was hashed.
Entry = tuple[int, Tensor | float, Tensor | float, dict[str, str]]


class Fingerprints:
    """The fingerprints of one run, from `after` updates on; lines of later steps are dropped with the first new one."""

    def __init__(self, world: World | None = None, folder: Path | None = None, after: int = 0) -> None:
        """`folder`: OUTPUT. Without them nothing is written, and nothing hashed."""
        self._hash = StateHash(world) if world is not None else None
        self._lines = (
            Lines(folder / FILE, after) if folder is not None and world is not None and world.is_main else None
        )
        self._waiting: list[Entry] = []
        self._written: list[Entry] = []  # last: a rank that is lost may not have
        self._folder = folder

    def regroup(self, world: World, step: int, back: bool = False) -> None:
        """Other ranks are left, after `step` updates, and another one may write. `back`: more updates had been made."""
        if self._hash is not None:
            self._hash = StateHash(world)
        if back and self._lines is not None:
            with suppress(OSError):
                self._lines.close()
            self._lines = None
        if self._folder is not None and self._lines is None and world.is_main:
            self._lines = Lines(self._folder / FILE, step)
            self._waiting = self._written + self._waiting  # those that are there already are left out

    def state_dict(self) -> dict[str, Any]:
        """The entries that are not written, and those that were written last: plain data. The host waits for the
        device."""
        entries_of = {"written": self._written, "waiting": self._waiting}
        return {
            name: [(step, float(loss), float(norm), dict(state)) for step, loss, norm, state in entries]
            for name, entries in entries_of.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another rank's."""
        self._written = [(*numbers, dict(hashes)) for *numbers, hashes in state["written"]]
        self._waiting = [(*numbers, dict(hashes)) for *numbers, hashes in state["waiting"]]

    def step(self, step: int, result: StepResult) -> None:
        """Keep the result of the step after which `step` updates are done."""
        if self._hash is not None:
            self._waiting.append((step, result.loss, result.grad_norm, {}))
            if len(self._waiting) >= _MOST:
                self.write()

    def state(self, strategy: Strategy) -> None:
        """The state as it is after the last step. Collective; the host waits for the device."""
        lines = self._waiting or self._written  # the latter where this is done once more, after a loss
        if self._hash is not None and lines:
            step, loss, norm, _ = lines[-1]
            lines[-1] = (step, loss, norm, dict(self._hash.of(strategy.sharded_state_dict())))
            self.write()

    def write(self) -> None:
        """The lines of the steps so far. The host waits for the device."""
        waiting, self._waiting = self._waiting, []
        self._written = waiting or self._written
        for step, loss, norm, state in waiting:
            if self._lines is not None:
                with suppress(OSError):  # it is kept, and tried again with the next line
                    self._lines.add(line(step, float(loss), float(norm)) | state)

    def close(self) -> None:
        with suppress(OSError, RuntimeError):  # where training failed, a device may give nothing any more
            self.write()
            if self._lines is not None:
                self._lines.close()


def fault(entry: Mapping[str, Any], skips: bool) -> str | None:
    """Describe the fault of a line by itself: its hash is not that of its numbers, or these are not finite.
    `skips`: whether the run leaves out such steps."""
    if not {"loss", "grad_norm", "hash"} <= entry.keys():
        return None
    loss, norm = entry["loss"], entry["grad_norm"]
    if loss is None or norm is None:
        return None if skips else "loss or gradient norm is not finite"
    if not all(isinstance(each, int | float) for each in (loss, norm)) or line(0, loss, norm)["hash"] != entry["hash"]:
        return "the hash is not that of loss and gradient norm: the line was changed after it was written"
    return None


def skips(run: Run) -> bool:
    """Whether steps that are not finite are left out, as the run file says, or as a loss scale does."""
    return run.on_nonfinite == "skip" or run.precision == "fp16"


def line(step: int, loss: float, norm: float) -> dict[str, Any]:
    """The line of a step; JSON has no word for what is not finite, and the hash tells such apart."""
    numbers = {name: value if math.isfinite(value) else None for name, value in (("loss", loss), ("grad_norm", norm))}
    digest = hashlib.blake2b(struct.pack("<dd", loss, norm), digest_size=8).hexdigest()
    return {"step": step, **numbers, "hash": digest}
