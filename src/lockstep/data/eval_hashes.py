"""The examples of validation and test, by their hashes, which rows of a stream are compared with one chunk at a time.

In: these splits, and the columns that make two examples the same. Out: which of them some rows of train are, and what
is said of those that stand in both. What is in memory grows with validation and test, and not with train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data import splitting

if TYPE_CHECKING:
    from datasets import Dataset

FILE = "held-out.npy"  # in the folder of an index


@dataclass(frozen=True)
class EvalHashes:
    """Hashes of examples that are not to be trained on. Its number in `hashes` stands for an example."""

    columns: tuple[str, ...]
    hashes: np.ndarray  # uint64 [examples, 2], in order, each once
    drop: bool  # rows of train that are one of them are not used

    @staticmethod
    def of(splits: Mapping[str, Dataset], columns: Sequence[str], drop: bool) -> EvalHashes:
        """Of all splits but train. By all cores."""
        found = [splitting.hashes(rows, columns) for split, rows in splits.items() if split != "train"]
        return EvalHashes(
            tuple(columns), np.unique(np.concatenate([np.empty((0, 2), np.uint64), *found]), axis=0), drop
        )

    @staticmethod
    def read(folder: Path, columns: Sequence[str]) -> EvalHashes | None:
        """Those that an index leaves out of train; None: it leaves none out."""
        path = folder / FILE
        return EvalHashes(tuple(columns), np.load(path), True) if path.exists() else None

    def write(self, folder: Path) -> None:
        """For `read`, where rows are left out."""
        if self.drop:
            np.save(folder / FILE, self.hashes)

    @property
    def content(self) -> list[Any]:
        """What stands for it in a key."""
        return [self.columns, hashlib.sha256(self.hashes.tobytes()).hexdigest(), self.drop]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {(int(a), int(b)): number for number, (a, b) in enumerate(self.hashes.tolist())}

    def standing(self, rows: Dataset) -> np.ndarray:
        """Of each row the number of the example that it is, or -1: int64 [rows]."""
        found = np.full(len(rows), -1, dtype=np.int64)
        if not len(self.hashes):
            return found
        own = splitting.hashed(rows[:], self.columns)
        at = np.minimum(np.searchsorted(self.hashes[:, 0], own[:, 0]), len(self.hashes) - 1)
        for row in np.flatnonzero(self.hashes[at, 0] == own[:, 0]):  # few, or the split is of no use
            found[row] = self._numbers.get((int(own[row, 0]), int(own[row, 1])), -1)
        return found

    def told(self, splits: Mapping[str, Dataset], places: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        """Examples of train that occur in other splits, as `splitting.overlap` counts them. `places`: of examples that
        stand in train, by their numbers, where the first one does."""
        told = {}
        for split, rows in splits.items():
            if split == "train":
                continue
            numbers = [self._numbers[int(a), int(b)] for a, b in splitting.hashes(rows, self.columns).tolist()]
            both = [row for row, number in enumerate(numbers) if number in places]
            if both:
                text = str(rows[both[0]][self.columns[0]])[: splitting.SHOWN]
                of = {"examples": len(both), "of": len(rows), "row": both[0], "text": text}
                told[split] = of | {"train_place": places[numbers[both[0]]]}
        return told
