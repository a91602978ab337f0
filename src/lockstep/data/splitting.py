"""Create the splits of a run: remove duplicates, hold out validation and test from train, and count or remove examples
that occur in two splits.

In: whole splits, and the columns that their task reads. Out: the final splits, and facts for reports: how many rows
were removed and why, and how many examples occur in train and another split. For a stream, `EvalHashes` holds the
hashes of validation and test; train rows are compared with them chunk by chunk, so memory grows with these splits and
not with train.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import arrow_cache, usable_rows
from lockstep.data.source import SOURCE, Source

if TYPE_CHECKING:
    from datasets import Dataset


# (train, share, seed, key of the run file that requests it) -> remaining and held-out rows.
Cut = Callable[["Dataset", float, Any, str], tuple["Dataset", "Dataset"]]
_ROWS = 10_000  # rows per batch
EXCERPT_CHARS = 60  # characters of an example in messages


def deduplicate_and_split(
    read: Source,
    splits: dict[str, Dataset],
    data: DataSection,
    seed: int,
    texts: Sequence[str],
    label: Sequence[str],
    cut: Cut,
) -> tuple[dict[str, Dataset], dict[str, Any]]:
    """Deduplicate, hold out validation and test, and detect overlaps; return splits and facts.

    `splits`: complete rows of `read`; without train for a stream. `texts`: columns that identify an example for
    evaluation. `label`: columns that must also be equal for a duplicate to be removed. Errors: `RunError`."""
    facts: dict[str, Any] = usable_rows.left_out(read.splits, splits)
    facts |= {"filtered": read.left_out} if read.left_out else {}
    if data.stream:
        if "validation" not in splits:
            raise RunError(
                "LS2260",
                "data.validation: missing; a share of a stream cannot be held out, because that needs all rows "
                "at once. Name files in data.validation, or put validation.* beside train.*",
            )
        return splits, facts | _of_sources(read, splits)
    if data.deduplicate:
        train, rows = splits["train"], first_of(hashes(splits["train"], [*texts, *label]))
        if len(rows) < len(train):
            facts["duplicates"] = {"train": len(train) - len(rows)}
            splits = splits | {"train": train.select(rows)}
    if _came_with_validation(read, splits):
        facts["own_validation"] = True
    splits = _cut_off(splits, data, seed, cut, read)
    overlaps, overlapping = overlap(splits, texts)
    if overlaps:
        facts["overlap"] = overlaps
    if overlaps and data.decontaminate:
        facts["dropped"] = {"train": len(overlapping)}
        rest = np.setdiff1d(np.arange(len(splits["train"])), overlapping)
        if len(rest) == 0:
            raise RunError(
                "LS2261",
                f"data.decontaminate: every row of the train split of {read.name} also occurs in "
                f"{' and '.join(overlaps)}, so no training data is left; check the files, or set "
                "data.decontaminate=false",
            )
        splits = splits | {"train": splits["train"].select(rest)}
    facts |= _of_sources(read, splits)
    for name, count in zip(read.sources, facts.get("sources", {"rows": {"train": []}})["rows"]["train"], strict=True):
        if count == 0:
            raise RunError(
                "LS2262",
                f"data.sources: {name}: no row is left in its train split; check its filter and data.decontaminate",
            )
    return splits, facts


def _of_sources(read: Source, splits: Mapping[str, Dataset]) -> dict[str, Any]:
    if not read.sources:
        return {}
    return {"sources": {"names": read.sources, "rows": {s: _counts(rows, read) for s, rows in splits.items()}}}


def _counts(rows: Dataset, read: Source) -> list[int]:
    """Number of examples per source."""
    return np.bincount(usable_rows.numbers(rows, SOURCE), minlength=len(read.sources)).tolist()


def _cut_off(splits: dict[str, Dataset], data: DataSection, seed: int, cut: Cut, read: Source) -> dict[str, Dataset]:
    """Hold out validation, and test if requested, from train; in a mixture from each source that has none. A source
    whose rows of a split were all removed does not get new ones."""
    import datasets

    if not read.sources:
        return _cut_one(splits, data, seed, cut, read.name, True)
    pieces: dict[str, list[Dataset]] = {}
    of = {split: usable_rows.numbers(dataset, SOURCE) for split, dataset in splits.items()}
    came_with = {split: _counts(dataset, read) for split, dataset in read.splits.items()}
    for number, name in enumerate(read.sources):
        rows = {split: np.flatnonzero(of[split] == number) for split in of if came_with[split][number]}
        groups = {split: splits[split].select(places) for split, places in rows.items()}
        for split, dataset in (
            _cut_one(groups, data, seed, cut, name, False) if len(groups["train"]) else groups
        ).items():
            pieces.setdefault(split, []).append(dataset)
    return {split: datasets.concatenate_datasets(parts) for split, parts in pieces.items()}


def _came_with_validation(read: Source, splits: Mapping[str, Dataset]) -> bool:
    """Return whether the data, or every source of a mixture, has its own validation split."""
    return "validation" in splits and (not read.sources or all(_counts(read.splits["validation"], read)))


def _cut_one(
    splits: dict[str, Dataset], data: DataSection, seed: int, cut: Cut, name: str, alone: bool
) -> dict[str, Dataset]:
    """Hold out validation and test, both as shares of the same whole. `alone`: not a source of a mixture, in which
    other sources may have a test split."""
    splits, share = dict(splits), data.test_fraction
    if share and "test" in splits and alone:
        raise RunError("LS2263", f"data.test_fraction: {name} has a test split already; remove data.test_fraction")
    cut_test = share > 0 and "test" not in splits
    if cut_test:
        splits["train"], splits["test"] = cut(splits["train"], share, [seed, 1], "test_fraction")
    if "validation" not in splits:
        rest = data.validation_fraction / (1 - (share if cut_test else 0))
        splits["train"], splits["validation"] = cut(splits["train"], rest, seed, "validation_fraction")
    return splits


# -- duplicates ------------------------------------------------------------------------------------------------------


def hashes(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """Hash of each row's content in `columns`, ignoring white space: uint64 [rows, 2]. Uses all cores."""
    some = dataset.select_columns(list(columns))
    pairs = np.frombuffer(mmap.mmap(-1, max(1, 16 * len(dataset))), np.uint64, 2 * len(dataset)).reshape(-1, 2)

    def work(part: range) -> None:
        for start in range(part.start, part.stop, _ROWS):
            stop = min(start + _ROWS, part.stop)
            pairs[start:stop] = hashed(some[start:stop], columns)

    arrow_cache.map_parts(arrow_cache.spans(len(dataset), arrow_cache.ROWS), work, "looking for equal examples")
    return pairs


def hashed(rows: Mapping[str, Sequence[Any]], columns: Sequence[str]) -> np.ndarray:
    """Hashes of rows given as columns."""
    digests = (
        hashlib.blake2b("\x1f".join(map(normalized, row)).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for row in zip(*(rows[column] for column in columns), strict=True)
    )
    return np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)


def normalized(value: Any) -> str:
    """Serialize a value to text. White space in texts is collapsed and stripped; the order of a mapping's keys does not
    count, and a null entry is the same as none."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        value = sorted((key, inner) for key, inner in value.items() if inner is not None)
    return "\x1e".join(["[", *map(normalized, value), "]"]) if isinstance(value, list | tuple) else repr(value)


def first_of(pairs: np.ndarray) -> np.ndarray:
    """First row of each distinct hash, in order: int64."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: the first of equal rows comes first
    ordered = pairs[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[new])


def overlap(splits: Mapping[str, Dataset], texts: Sequence[str]) -> tuple[dict[str, dict[str, Any]], np.ndarray]:
    """Overlap with train: split -> number of its examples in train, and the first one; and the rows of train that occur
    in another split, in order."""
    train = hashes(splits["train"], texts)
    overlaps: dict[str, dict[str, Any]] = {}
    overlapping = np.zeros(len(train), dtype=bool)
    for split, dataset in splits.items():
        if split == "train":
            continue
        other = hashes(dataset, texts)
        near = _among(train, other[:, 0])  # candidate rows of train
        both = np.concatenate([other, train[near]])
        groups = np.empty(len(both), dtype=np.int64)  # equal rows have equal numbers
        sort = np.lexsort((both[:, 1], both[:, 0]))
        groups[sort] = np.cumsum(np.r_[True, (both[sort][1:] != both[sort][:-1]).any(axis=1)])
        here, there = groups[: len(other)], groups[len(other) :]
        rows = np.flatnonzero(np.isin(here, there))
        overlapping[near[np.isin(there, here)]] = True
        if len(rows):
            row = int(rows[0])
            overlaps[split] = {
                "examples": len(rows),
                "of": len(dataset),
                "row": row,
                "train_row": int(near[np.flatnonzero(there == here[row])[0]]),
                "text": excerpt(dataset[row][texts[0]]),
            }
    return overlaps, np.flatnonzero(overlapping)


def excerpt(value: Any) -> str:
    """The start of a value for a message; for an image, its file's name or ""."""
    if isinstance(value, dict) and "bytes" in value:
        value = value.get("path") or ""
    return "" if isinstance(value, bytes) else str(value)[:EXCERPT_CHARS]


def _among(pairs: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Sorted rows whose first hash half is in `some`: int64. Processes `pairs` in parts, in constant extra memory."""
    sample = np.unique(some)
    rows = [np.empty(0, dtype=np.int64)]
    for start in range(0, len(pairs), arrow_cache.ROWS):
        part = pairs[start : start + arrow_cache.ROWS, 0]
        at = np.minimum(np.searchsorted(sample, part), max(0, len(sample) - 1))
        rows.append(start + np.flatnonzero(sample[at] == part) if len(sample) else rows[0])
    return np.concatenate(rows)


FILE = "held-out.npy"  # in the folder of an index


@dataclass(frozen=True)
class EvalHashes:
    """Hashes of evaluation examples, for decontamination of train. An example's number is its index in `hashes`."""

    columns: tuple[str, ...]
    hashes: np.ndarray  # uint64 [examples, 2], sorted, distinct
    drop: bool  # exclude them from train

    @staticmethod
    def of(splits: Mapping[str, Dataset], columns: Sequence[str], drop: bool) -> EvalHashes:
        """Hash all splits but train. Uses all cores."""
        arrays = [hashes(rows, columns) for split, rows in splits.items() if split != "train"]
        return EvalHashes(
            tuple(columns), np.unique(np.concatenate([np.empty((0, 2), np.uint64), *arrays]), axis=0), drop
        )

    @staticmethod
    def read(folder: Path, columns: Sequence[str]) -> EvalHashes | None:
        """The hashes of an index that excludes evaluation examples from train; None if it excludes none."""
        path = folder / FILE
        return EvalHashes(tuple(columns), np.load(path), True) if path.exists() else None

    def write(self, folder: Path) -> None:
        """Write the hashes for `read`."""
        if self.drop:
            np.save(folder / FILE, self.hashes)

    @property
    def content(self) -> list[Any]:
        """Its part of a cache key."""
        return [self.columns, hashlib.sha256(self.hashes.tobytes()).hexdigest(), self.drop]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        return {(int(a), int(b)): number for number, (a, b) in enumerate(self.hashes.tolist())}

    def example_numbers(self, rows: Dataset) -> np.ndarray:
        """Number of the evaluation example that equals each row, or -1: int64 [rows]."""
        numbers = np.full(len(rows), -1, dtype=np.int64)
        if not len(self.hashes):
            return numbers
        hashes = hashed(rows[:], self.columns)
        at = np.minimum(np.searchsorted(self.hashes[:, 0], hashes[:, 0]), len(self.hashes) - 1)
        for row in np.flatnonzero(self.hashes[at, 0] == hashes[:, 0]):  # few candidates
            numbers[row] = self._numbers.get((int(hashes[row, 0]), int(hashes[row, 1])), -1)
        return numbers

    def overlap(self, splits: Mapping[str, Dataset], places: Mapping[int, str]) -> dict[str, dict[str, Any]]:
        """Evaluation examples that occur in train, counted as in `splitting.overlap`. `places`: example number ->
        location of its first occurrence in train."""
        overlaps = {}
        for split, rows in splits.items():
            if split == "train":
                continue
            numbers = [self._numbers[int(a), int(b)] for a, b in hashes(rows, self.columns).tolist()]
            both = [row for row, number in enumerate(numbers) if number in places]
            if both:
                text = excerpt(rows[both[0]][self.columns[0]])
                of = {"examples": len(both), "of": len(rows), "row": both[0], "text": text}
                overlaps[split] = of | {"train_place": places[numbers[both[0]]]}
        return overlaps
