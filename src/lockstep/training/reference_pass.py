"""Compute the reference outputs of the untrained model for every example, as needed for preference learning.

For tasks with `UsesReference`, without a second copy of the model. In: a built strategy with the initial weights. Out:
numbers by split in the task, equal on every rank and at any number of ranks, and a file in OUTPUT from which a resumed
run or an evaluation reads them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lockstep.checkpoint.manifest import candidates
from lockstep.config.errors import reason_of, remedy_of
from lockstep.config.output_files import replacing, wrapped_os_errors
from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Prepared
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task, UsesReference
from lockstep.track.busy import ACTIVITY
from lockstep.training.data_loader import usual_batch

FILE = "reference.safetensors"


def provide(world: World, task: Task, strategy: Strategy, prepared: Prepared, trained: bool) -> None:
    """Fill `task.reference_outputs`. `trained`: the model is already trained, so the numbers must be in OUTPUT.
    Collective. Errors: `RunError` on every rank if they are not, or cannot be written."""
    run = task.run
    if not isinstance(task, UsesReference) or not task.needs_reference:
        return
    path, known = run.folder / FILE, None
    if world.is_main and (trained or next(iter(candidates(run.folder)), None) is not None):
        known = _read(path, prepared.key)
    known = world.broadcast(known)
    if known is None and trained:
        raise RunError(
            "LS5110",
            f"{path}: the reference outputs (those of the model before training, to which the scores of this "
            "task are relative) are missing or belong to other data; restore this file of the run",
        )
    if known is None:
        known = {split: _scores_of_split(world, task, strategy, split) for split in task.splits}
        fault = _write(path, known, prepared.key) if world.is_main and run.folder.is_dir() else None
        if (fault := world.broadcast(fault)) is not None:
            raise RunError("LS5111", fault)
    task.reference_outputs.update(known)


def _write(path: Path, outputs: dict[str, np.ndarray], key: str) -> str | None:
    """Write the file; the return value says why it cannot be written."""
    try:
        with replacing(path) as aside, wrapped_os_errors(path):
            save_file(outputs, aside, {"data": key})
    except OSError as error:
        return f"{path}: the reference outputs cannot be written: {reason_of(error).lower()}; {remedy_of(error)}"
    return None


def _read(path: Path, key: str) -> dict[str, np.ndarray] | None:
    try:
        with safe_open(path, "numpy") as file:
            if (file.metadata() or {}).get("data") != key:
                return None
            return {split: file.get_tensor(split) for split in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def _scores_of_split(world: World, task: UsesReference, strategy: Strategy, split: str) -> np.ndarray:
    """Reference outputs of each example of a split: float64 [N, `reference_size`]. Collective.

    Batches do not depend on `evaluate`, because their cut affects the last bits of these numbers and through them the
    weights. Ranks take turns, and one rank fills in each row, so that the sum over ranks is exact."""
    columns, size = task.splits[split], task.reference_batch_size or usual_batch(task)
    order = np.argsort(-np.asarray(columns.lengths), kind="stable")
    reference = torch.zeros(len(columns), task.reference_size, dtype=torch.float64, device=world.device)
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    for turn in range(0, len(batches), strategy.data_parallel.size):
        ACTIVITY.set(f"reference outputs of {split}, batch {turn}")
        mine = turn + strategy.data_parallel.rank
        rows = batches[mine] if mine < len(batches) else order[:0]
        seed_everything(task.run.seed, -1, mine)
        try:
            scores = task.reference_scores(strategy.forward, task.collate(columns, rows, 0).to(world.device))
        except torch.OutOfMemoryError as caught:
            caught.add_note(f"({ACTIVITY.name}, of {size} examples; task.reference_batch_size sets a smaller number)")
            raise
        reference[torch.from_numpy(rows).to(world.device)] = scores[: len(rows)]
    return strategy.data_parallel.all_reduce(reference).cpu().numpy()
