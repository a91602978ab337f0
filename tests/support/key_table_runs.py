"""Small runs whose keys are changed one by one, and their observations, for tests/config/test_run_file_keys.py.

In: a kind of run, overrides, a folder. Out: a hash of each thing that a key may change (`key_table.EFFECTS`). Keys that
only change arithmetic are observed in three steps of a strategy; the others in a whole `lockstep train`.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from lockstep.training.data_loader import StepLoader
from support.harness import TINY, build_with_feed, digest
from support.key_table import Tried
from support.task_runs import TASKS, make, sentence, write

STEPS = 3
INPUTS = ("input_ids", "token_type_ids", "decoder_input_ids")
SMALL = {"steps": STEPS, "micro_batches": 4, "strategy": {"name": "single"}, "track": {"every": 1}}
SMALL |= {"launch": TINY["launch"] | {"processes": 1}, "fingerprint": {"every": 1}}
RUN_FILE = re.compile(r"(`{3,})yaml.*?\1", re.DOTALL)  # in the model card, with every key in it
TIMES = re.compile(r"[\d.,]+ ?(s|ms|min|h|MiB|GiB|/s)\b|\d{4}-\d\d-\d\d[T ][\d:.]+Z?")


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Labelled texts, some of them duplicates."""
    draw = random.Random(seed)
    found = []
    for place in range(count):
        text, number = sentence(draw), draw.randrange(3)
        found.append(
            {"text": text, "other": sentence(draw, 6), "label": "abc"[number], "number": number}
            | {"two": "yn"[number % 2], "lists": ["abc"[number]] * (place % 4 > 0), "lang": draw.choice(["en", "de"])}
            | {"split": "validation" if place % 4 == 0 else "train"}
        )
    return found + found[:5]


def _rows(folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", train)
    write(folder / "validation.jsonl", validation)
    write(folder.parent / "odd.jsonl", [*validation, validation[0] | {"label": "d"}])
    return {"data": {"source": str(folder), "max_length": 32}}


def _plain(row: dict[str, Any]) -> str:
    """Text of a row without commas, which would separate cells."""
    return row["text"].replace(",", "")


def _cut(folder: Path) -> dict[str, Any]:
    write(folder / "cut.jsonl", rows(90, 0))
    return {"data": {"train": str(folder / "cut.jsonl"), "max_length": 32}}


def _table(folder: Path) -> dict[str, Any]:
    lines = [f'"{_plain(row)}",{row["label"]}\n' for row in rows(90, 3)]
    (folder / "table.csv").write_text("".join(lines))
    return {"data": {"train": str(folder / "table.csv"), "columns": ["text", "label"], "max_length": 32}}


def _linked(folder: Path) -> dict[str, Any]:
    _rows(folder / "elsewhere-of-link", rows(90, 0), rows(15, 1))
    (folder / "linked").mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (folder / "linked" / name).symlink_to(folder / "elsewhere-of-link" / name)
    return {"data": {"source": str(folder / "linked"), "max_length": 32}}


def _latin(folder: Path) -> dict[str, Any]:
    (folder / "latin.csv").write_text(
        "text,label\n" + "".join(f"{_plain(row)} ü,{row['label']}\n" for row in rows(90, 0)), encoding="latin-1"
    )
    return {"data": {"train": str(folder / "latin.csv"), "max_length": 32}}


def _task(name: str, folder: Path) -> dict[str, Any]:
    make(folder, name)
    return {"data": {"source": str(folder / name), "max_length": 32}} | TASKS[name]


def _easy(folder: Path) -> dict[str, Any]:
    """Translations that a small model half learns in forty steps: one sentence per word."""
    draw = random.Random(0)
    word, answers = (
        ["dog", "cat", "bird"],
        ["a big old dog runs .", "the red cat, near the house", "birds see small dogs"],
    )
    for split, count in (("train", 90), ("validation", 15)):
        made = [draw.randrange(3) for _ in range(count)]
        (folder / "easy").mkdir(exist_ok=True)
        write(folder / "easy" / f"{split}.jsonl", [{"translation": {"en": word[n], "de": answers[n]}} for n in made])
    return {"data": {"source": str(folder / "easy"), "max_length": 32}} | TASKS["translation"]


def _missing(folder: Path) -> dict[str, Any]:
    return _rows(folder / "missing", [*rows(90, 0), rows(1, 0)[0] | {"text": None}], rows(15, 1))


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "emotion": lambda folder: {},
    "rows": lambda folder: _rows(folder / "rows", rows(90, 0) + rows(15, 1)[:3], rows(15, 1)),
    "missing": _missing,
    "easy": _easy,
    "cut": _cut,
    "table": _table,
    "headless": lambda folder: {"data": {"train": _table(folder)["data"]["train"], "max_length": 32}},
    "linked": _linked,
    "latin": _latin,
    **{name: partial(_task, name) for name in TASKS},
}


class Place:
    """A folder with data of each kind, and observations shared by several keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bases, self.seen = folder, {}, {}
        _rows(folder / "half", rows(45, 2), rows(15, 1))

    def base(self, kind: str) -> dict[str, Any]:
        if kind not in self.bases:
            self.bases[kind] = TINY | SMALL | KINDS[kind](self.folder)
        return self.bases[kind]

    def observed(self, kind: str, words: tuple[str, ...], whole: bool, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Observations of a run of `kind` with these overrides, `whole` or of three steps."""
        key = kind, words, whole
        if key not in self.seen:
            self.seen[key] = self._whole(kind, words, patch) if whole else self._steps(kind, words, patch)
        return self.seen[key]

    def _steps(self, kind: str, words: tuple[str, ...], patch: pytest.MonkeyPatch) -> dict[str, Any]:
        words = tuple(word.replace("FOLDER", str(self.folder)) for word in words)
        run = load(None, (*words, f"output={self.folder / 'none'}"), self.base(kind))
        with patch.context() as inside:
            told = watch(inside)
            world = World(run)
            _, strategy, feed = build_with_feed(run, world)
            weights = []
            for step in range(min(feed.total, STEPS)):
                rate = learning_rate(run.optim, step + 1, feed.total)
                done = strategy.train_step(feed.make(step), rate)
                weights.append((float(done.loss), float(done.grad_norm), digest(strategy.state.state_dict())))
            strategy.close()
        return {"refused": False, "weights": weights} | batches(told)

    def _whole(self, kind: str, words: tuple[str, ...], patch: pytest.MonkeyPatch) -> dict[str, Any]:
        output = self.folder / "runs" / str(len(self.seen))
        words = tuple(word.replace("FOLDER", str(self.folder)) for word in words)
        if not any(word.startswith("output=") for word in words):
            words += (f"output={output}",)
        if self._refused(kind, words):
            return {"refused": True}
        run = load(None, words, self.base(kind))
        file = self.folder / f"{len(self.seen)}.yaml"
        file.write_text(run.dump())
        with patch.context() as inside:
            told = watch(inside)
            if main(["train", str(file)]) != 0:
                return {"refused": True}
        seen = results(run.folder)
        last = max(seen["weights"])
        return {"refused": False} | batches({at: made for at, made in told.items() if at[0] < last}) | seen

    def _refused(self, kind: str, words: tuple[str, ...]) -> bool:
        try:
            load(None, words, self.base(kind))
        except ValueError:
            return True
        return False


Batch = tuple[list[int], str, list[float]]


def watch(patch: pytest.MonkeyPatch) -> dict[tuple[int, int], Batch]:
    """Record while a run trains: (step, micro-batch) -> its rows, a hash of tokens and integer targets, and fractional
    targets."""
    seen: dict[tuple[int, int], Batch] = {}
    collated = StepLoader._collated

    def collate(self: StepLoader, step: int, chosen: np.ndarray, index: int) -> Any:
        batch = collated(self, step, chosen, index)
        told = hashlib.sha256()
        for name in INPUTS:
            if (tensor := batch.inputs.get(name)) is not None:
                told.update(f"{name}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        fractions = batch.targets.flatten().tolist() if batch.targets.is_floating_point() else []
        told.update(b"" if fractions else batch.targets.numpy().tobytes())
        seen[step, index] = (chosen.tolist(), told.hexdigest(), fractions)
        return batch

    patch.setattr(StepLoader, "_collated", collate)
    return seen


def batches(told: dict[tuple[int, int], Batch]) -> dict[str, Any]:
    """Rows and their content, by step and micro-batch."""
    return {
        "order": sorted((at, batch[0]) for at, batch in told.items()),
        "inputs": sorted((at, *batch[1:]) for at, batch in told.items()),
    }


def results(output: Path) -> dict[str, Any]:
    """Files of a finished run."""
    lines = [json.loads(line) for line in (output / "fingerprints.jsonl").read_text().splitlines()]
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    weights = {line["step"]: (line["hash"], line.get("weights")) for line in lines}
    export = sorted((output / "export").glob("*.safetensors"))
    return {
        "weights": weights,
        "export": [hashlib.sha256(path.read_bytes()).hexdigest() for path in export],
        "scores": json.loads((output / "scores.json").read_text()),
        "files": (
            [name for name in names if not re.search(r"log|\.lock|plan", name)],
            [line.get("step") for line in logged],
            [step for step, hashes in weights.items() if hashes[1]],
        ),
        "text": (
            TIMES.sub("", RUN_FILE.sub("", (output / "export" / "README.md").read_text())),
            (output / "samples.jsonl").read_text() if (output / "samples.jsonl").exists() else "",
        ),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Differences of two runs. Inputs are compared if the order is equal; scores and export only with equal weights,
    and texts only with equal scores."""
    if one["refused"] or other["refused"]:
        return {"refused"} if one["refused"] != other["refused"] else set()
    different = {name for name in ("order", "files") if one.get(name) != other.get(name)}
    if "order" not in different and not alike(one["inputs"], other["inputs"], 1e-4):
        different.add("inputs")
    if not same_weights(one["weights"], other["weights"]):
        return different | {"weights"}
    different |= {name for name in ("export", "scores") if not alike(one.get(name), other.get(name))}
    if not different & {"export", "scores"} and one.get("text") != other.get("text"):
        different.add("text")
    return different


def same_weights(one: Any, other: Any) -> bool:
    """Whether two runs took equally many steps and have the same weights at every step that both recorded."""
    if not isinstance(one, dict):
        return bool(one == other)
    both = [pair for step in one.keys() & other.keys() for pair in zip(one[step], other[step], strict=True)]
    return max(one) == max(other) and all(None in pair or pair[0] == pair[1] for pair in both)


def alike(one: Any, other: Any, near: float = 1e-6) -> bool:
    """Whether two values are equal within rounding. `near`: tolerance around zero."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=near)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[key], near) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(alike(*pair, near) for pair in zip(one, other, strict=True))
    return bool(one == other)


def tried(place: Place, case: Tried, patch: pytest.MonkeyPatch) -> set[str]:
    """Observed effects of a case."""
    whole = not {*case.effects.split()} <= {"order", "inputs", "weights"}
    one = place.observed(case.kind, case.beside, whole, patch)
    return differences(one, place.observed(case.kind, (*case.beside, case.change), whole, patch))
