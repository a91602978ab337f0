"""Items of a data set of the user's, read with seeded random numbers, and made into batches.

In: a data set, places in it, the seed and the step. Out: a `Bundle`, which is one micro-batch for the user's model.
What an item draws depends on the seed, the step and its place, and on nothing else: not on the rank, nor on a worker.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.config.run import Run, RunError
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.cache import discard
from lockstep.data.tokens import Columns
from lockstep.distributed.randomness import seed_everything
from lockstep.tasks.modules import user_functions

INPUT = "lockstep_batch"  # the one input of the model, see `running.py`
_ITEM = 2  # sets the numbers of items apart from those of models and collating


@dataclass(frozen=True)
class Bundle:
    """A batch of the user's, of whatever kind. `MicroBatch` asks of it what it asks of a tensor."""

    batch: Any
    examples: int
    targets: int
    blank: bool = False  # only levels ranks: its loss is zero
    asks: str = "numbers"  # in evaluation: "numbers", or "generate"

    def to(self, device: Any, non_blocking: bool = False) -> Bundle:
        """Every tensor in it, and what else has a `to`, on a device."""
        return replace(self, batch=_mapped("to", self.batch, device, non_blocking=non_blocking))

    def pin_memory(self) -> Bundle:
        """Every tensor in it in page-locked memory."""
        return replace(self, batch=_mapped("pin_memory", self.batch))

    def __getitem__(self, first: slice) -> Bundle:
        """Of `MicroBatch.blank`: the same batch, which counts for nothing."""
        return replace(self, blank=True)


def _mapped(method: str, part: Any, *arguments: Any, **named: Any) -> Any:
    """A method of tensors, and of objects of the user's that have it too, wherever they are in a batch."""
    if hasattr(part, method):
        return getattr(part, method)(*arguments, **named)
    if isinstance(part, Mapping):
        return {key: _mapped(method, inner, *arguments, **named) for key, inner in part.items()}
    if isinstance(part, list | tuple):
        parts = [_mapped(method, inner, *arguments, **named) for inner in part]
        return type(part)(parts) if type(part) in (list, tuple) else type(part)(*parts)  # the latter: named ones
    return part


class Items(Columns):
    """A split: which items it has, how long each is, and how many targets it holds. The length is 1 for all unless
    `task.length` says more."""

    def __init__(self, data: Any, places: np.ndarray, path: str, name: str) -> None:
        super().__init__(path)
        self.data, self.places, self.name, self.path = data, places, name, Path(path)
        self.lengths = self.flat("length").astype(np.int32)  # [examples]
        self.targets = self.flat("targets").astype(np.int64)  # [examples]
        if len(places) != len(self):
            raise RunError(f"task.data: the {name} split had {len(self)} items when it was prepared, and {len(places)} "
                           "now; what it gives must not change while a run starts")  # fmt: skip

    @property
    def sides(self) -> list[np.ndarray]:
        return [self.lengths]


def item(run: Run, data: Any, place: int, step: int) -> Any:
    """The item at a place, which draws from Python's, numpy's and torch's generators as (seed, step, place) says.
    Errors: `RunError`."""
    seed_everything(run.seed, step, place, _ITEM)
    with user_functions.asked(run, "data", f": item {place}"):
        return data[place]


class Batches(Dataset):
    """What workers make: a batch for each (step, micro-batch, rows)."""

    def __init__(self, run: Run, columns: Items) -> None:
        self.run, self.columns = run, columns
        self.collate = user_functions.function(run, "collate") or default_collate
        self.functions = {name: user_functions.function(run, name) for name in ("length", "targets")}
        self.compared = np.zeros(len(columns), dtype=bool)

    def __getitem__(self, job: tuple[int, int, np.ndarray]) -> Bundle:
        """For no rows two examples, which BatchNorm needs. Errors: `RunError`."""
        step, index, rows = job
        blank = len(rows) == 0
        rows = np.zeros(2, dtype=np.int64) if blank else rows
        found = [item(self.run, self.columns.data, int(self.columns.places[row]), step) for row in rows]
        self._compare(rows, found)
        seed_everything(self.run.seed, step, index, 1)
        batch = collated(self.run, self.collate, found)
        return Bundle(batch, len(rows), int(self.columns.targets[rows].sum()), blank)

    def _compare(self, rows: np.ndarray, found: list[Any]) -> None:
        """Errors: `RunError` when an item holds another number of targets than before, which divide the loss, or has
        another length, by which steps are cut."""
        for row, each in zip(rows, found, strict=True):
            if (count := self._measured("targets", each)) not in (None, self.columns.targets[row]):
                told = "it must not depend on what is drawn at random"
                if self._again("targets", int(row)) != self.columns.targets[row]:
                    told = self._changed()
                raise RunError(
                    f"task.targets: {self._called(row)} holds {count} targets, and held {self.columns.targets[row]} "
                    f"when the data was prepared; {told}"
                )
            if not self.compared[row]:  # once: it may be drawn at random, and differ whenever it is read
                self.compared[row] = True
                first = self._measured("length", each)
                if first not in (None, self.columns.lengths[row]):
                    length = self._again("length", int(row))
                    if length != self.columns.lengths[row]:
                        raise RunError(
                            f"task.length: {self._called(row)} has the length {length}, and had "
                            f"{self.columns.lengths[row]} when the data was prepared; {self._changed()}"
                        )

    def _called(self, row: int) -> str:
        return f"item {self.columns.places[row]} of the {self.columns.name} split"

    def _measured(self, name: str, each: Any) -> int | None:
        """What `task.length` or `task.targets` says of an item; None: nothing. Errors: `RunError`."""
        if self.functions[name] is None:
            return None
        with user_functions.asked(self.run, name):
            return int(self.functions[name](each))

    def _again(self, name: str, row: int) -> int | None:
        """Length of an item that draws what it drew when the data was prepared. Errors: `RunError`."""
        return self._measured(name, item(self.run, self.columns.data, int(self.columns.places[row]), -1))

    def _changed(self) -> str:
        """Have all items measured again at the next start, and say why."""
        discard(self.columns.path)
        return (
            "the data has changed since, in items that are not looked at when a run starts. All are measured again "
            "when you start it again"
        )


def collated(run: Run, collate: Callable[[list[Any]], Any], found: list[Any]) -> Any:
    """Items as a batch. Errors: `RunError`."""
    try:
        return collate(found)
    except Exception as error:
        if run.task.options.get("collate") is not None:
            with user_functions.asked(run, "collate"):
                raise
        raise RunError(
            "task.data: torch's default_collate cannot make a batch of these items "
            f"({user_functions.error_line(error)}); give task.collate: my_file.collate, which makes a batch of a list "
            "of items (and pads them where they differ)"
        ) from error


def micro_batch(run: Run, columns: Items, rows: np.ndarray, index: int, step: int) -> MicroBatch:
    """The items at `rows` as a micro-batch; for no rows, one that counts for nothing. Errors: `RunError`."""
    return placed(columns, rows, index, Batches(run, columns)[step, index, rows])


def in_workers(
    run: Run, columns: Items, jobs: Iterable[tuple[int, int, np.ndarray]], count: int
) -> Iterator[MicroBatch]:
    """Micro-batches of each job, in this order, made by `count` processes ahead of time. Errors: `RunError`."""
    asked: list[tuple[int, int, np.ndarray]] = []

    def told() -> Iterator[tuple[int, int, np.ndarray]]:
        for job in jobs:
            asked.append(job)
            yield job

    loader: Any = DataLoader(
        Batches(run, columns),
        sampler=_Jobs(told),
        batch_size=None,
        num_workers=count,
        # Forked from this rank: they need no pickled data set, and see when it is gone. Ranks would have a server each
        # to fork from otherwise, which outlives them.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),  # so that the rank's own is left alone
    )
    try:
        for bundle in loader:
            _, index, rows = asked.pop(0)
            yield placed(columns, rows, index, bundle)
    except RunError as caught:  # with the worker's traceback in front
        raise RunError(str(caught).strip().splitlines()[-1].partition("RunError: ")[2] or str(caught)) from None


class _Jobs:
    """An order for `DataLoader`, which wants something to go through."""

    def __init__(self, jobs: Callable[[], Iterator[Any]]) -> None:
        self.jobs = jobs

    def __iter__(self) -> Iterator[Any]:
        return self.jobs()


def placed(columns: Items, rows: np.ndarray, index: int, bundle: Bundle) -> MicroBatch:
    """A batch as a micro-batch; each of its targets is a 0 in `targets`: int8 [B, most of an example]."""
    counts = torch.from_numpy(columns.targets[rows])[:, None]  # [B, 1]
    real = torch.arange(int(counts.max()) if len(rows) else 1) < counts  # [B, most]
    targets = torch.where(real, 0, IGNORED) if len(rows) else torch.full((1, 1), IGNORED)
    return MicroBatch(index, {INPUT: bundle}, targets.to(torch.int8))  # type: ignore[dict-item]


# -- what items hold -------------------------------------------------------------------------------------------------


def seal(run: Run, data: Any, places: np.ndarray, most: int) -> str:
    """A hash of how many items there are and of what some of them hold, evenly spread."""
    seen = hashlib.sha256(f"{len(data)} {len(places)}\n".encode())
    for at in np.unique(np.linspace(0, len(places) - 1, most).astype(np.int64)):
        _hashed(seen, item(run, data, int(places[at]), -1))
    return seen.hexdigest()


def same(first: Any, second: Any) -> bool:
    """Whether two items hold the same."""
    hashes = []
    for each in (first, second):
        seen = hashlib.sha256()
        _hashed(seen, each)
        hashes.append(seen.digest())
    return hashes[0] == hashes[1]


def _hashed(seen: Any, value: Any, depth: int = 6) -> None:
    """Add a value to a hash: tensors, arrays, images, numbers, texts, and what holds them. Of other objects the type
    and their attributes."""
    seen.update(f"{type(value).__name__}\n".encode())
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        seen.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        seen.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        seen.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | bool | None):
        seen.update(f"{value!r}\n".encode())
    elif hasattr(value, "tobytes") and not isinstance(value, np.ndarray):  # a picture
        seen.update(value.tobytes())
    elif depth:
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        parts = enumerate(value) if isinstance(value, list | tuple | np.ndarray) else held.items()
        for key, part in parts:
            seen.update(f"{key}\n".encode())
            _hashed(seen, part, depth - 1)
