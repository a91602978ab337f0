"""Places where trials run at the same time: how many processes, and which GPUs, each of them has.

In: a sweep. Out: keys and variables for the trial in each place. Only the `local` launcher's machine is shared out.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Any

from lockstep.config.run import Run, RunError
from lockstep.launchers.local import processes_of
from lockstep.tools.sweep.sweep_file import Sweep


class Slots:
    """The places of one sweep, numbered from 0."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._devices = visible(sweep.base) if sweep.parallel > 1 else []

    def free(self, taken: Container[int]) -> int | None:
        """A place that is not taken, or None."""
        return next((i for i in range(self._sweep.parallel) if i not in taken), None)

    def keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """What a trial with these keys is given besides: with several at once, its share of the processes where their
        number is left open. Errors: `RunError` when there are not enough GPUs."""
        if self._sweep.parallel == 1:
            return {}
        run = self._sweep.load(keys)
        if run.launch.name != "local":
            return {}
        if run.launch.processes == "auto":
            return {"launch.processes": max(1, processes_of(run) // self._sweep.parallel)}
        if self._devices and self._each < int(run.launch.processes):
            raise RunError(
                f"--parallel: {self._sweep.parallel} trials of {run.launch.processes} process(es) need a GPU each, and "
                f"there are {len(self._devices)}; take fewer at once or launch.device=cpu"
            )
        return {}

    def variables(self, slot: int) -> dict[str, str]:
        """For the processes of the trial in a place: the GPUs that are its own."""
        if not self._devices:
            return {}
        mine = self._devices[slot * self._each : (slot + 1) * self._each]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}

    @property
    def _each(self) -> int:
        """GPUs of a place."""
        return len(self._devices) // self._sweep.parallel


def visible(run: Run) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none under `launch.device: cpu`."""
    if run.launch.device == "cpu":
        return []
    try:
        import torch
    except ImportError:  # a machine that only submits
        return []
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(i) for i in range(count)]
