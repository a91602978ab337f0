"""Small runs of everything that `classification` learns, on generated data, for tests of the promise.

In: a folder for data, the name of a kind, overrides. Out: runs of seconds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lockstep.config.run import Run, load
from support.harness import TINY
from support.task_runs import BERT, sentence, write

ANIMALS = ["bird", "cat", "dog"]
LISTS = {"label": "animals", "multi_label": True}
# kind -> keys of the task
KINDS: dict[str, dict[str, Any]] = {
    "balanced": {"label": "animal", "class_weights": "balanced", "label_smoothing": 0.1},
    "weights": {"label": "animal", "class_weights": {"cat": 3.0, "none": 0.3}},
    "focal": {"label": "animal", "loss": "focal", "class_weights": "balanced"},
    "two": {"label": "long", "threshold": "validation"},
    "lists": LISTS,
    "lists, shaped": LISTS | {"class_weights": "balanced", "label_smoothing": 0.1, "threshold": 0.4},
    "lists, focal": LISTS | {"loss": "focal"},
    "columns": {"label": ["has_bird", "has_cat"], "multi_label": True},
    "number": {"label": "length", "regression": True},
    "numbers": {"label": ["length", "birds"], "regression": True, "loss": "mae"},
    "vector": {"label": "both", "regression": True},
}


def row(draw: random.Random) -> dict[str, Any]:
    """One generated example with labels of every kind; its numbers count words, starting below zero."""
    text = sentence(draw)
    words = text.split()
    there = [animal for animal in ANIMALS if animal in words]
    numbers = [len(words) / 4 - 2.5, float(words.count("bird"))]
    return {
        "text": text,
        "animal": there[0] if there else "none",
        "long": "long" if len(words) > 8 else "brief",
        "animals": there[::-1],
        "has_bird": int("bird" in words),
        "has_cat": int("cat" in words),
        "length": numbers[0],
        "birds": numbers[1],
        "both": numbers,
    }


def make(folder: Path, kind: str, *overrides: str, **values: Any) -> Run:
    """A run of one kind, on data written to `folder`."""
    draw = random.Random(5)
    for split, number in (("train", 90), ("validation", 31), ("test", 24)):
        path = folder / "data" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write(path, [row(draw) for _ in range(number)])
    whole = TINY | {
        "task": {"name": "classification"} | KINDS[kind],
        "model": BERT,
        "data": {"source": str(folder / "data"), "max_length": 32},
        "tokenizer": {"train": "wordlevel", "vocab_size": 100},
        "output": str(folder / kind.replace(", ", "-")),
        "evaluate": {"batch_size": 7},
    }
    return load(None, list(overrides), whole | values)
