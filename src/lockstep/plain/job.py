"""What a run is made of for the plain path: its rows, examples, labels and tokenizer.

In: a run file as a mapping, and a tokenizer's folder. Out: a `Plain`, which reads what it is asked for, once.
"""

from functools import cache, cached_property
from typing import Any

import numpy as np

from lockstep.plain import examples as made
from lockstep.plain.rows import Row, read_splits


class Plain:
    """A run, read plainly. `rows`: raw rows by split, where the caller has read them; `labels`: the values of labels in
    the order of their codes, where those rows do not show all."""

    def __init__(
        self, run: dict, tokenizer: str, rows: dict[str, list[Row]] | None = None, labels: list[Any] | None = None
    ) -> None:
        from transformers import AutoTokenizer

        self.run = run
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=run["model"]["trust_remote_code"])
        if rows is not None:
            self.splits = rows
        if labels is not None:
            self.labels = labels

    @cached_property
    def splits(self) -> dict[str, list[Row]]:
        """The rows of all splits."""
        return read_splits(self.run, self.tokenizer)

    def rows(self, split: str) -> list[Row]:
        """The rows of a split."""
        return self.splits[split]

    @cached_property
    def labels(self) -> list[Any]:
        """The values of labels, in the order of their codes: those of all rows of train, before any is cut off."""
        return made.values_of_labels(self.run, self.splits["train"])

    @property
    def names(self) -> list[str]:
        """What labels are called in the model's config."""
        return self.run["task"].get("label_names") or [str(label) for label in self.labels]

    @cached_property
    def class_weights(self) -> list[float] | None:
        """The weight of each label in the loss, to a millionth (2^-20), as the run file gives them."""
        task = self.run["task"]
        wanted = task.get("class_weights")
        if not wanted:
            return None
        if isinstance(wanted, dict):
            found: Any = [wanted.get(name, 1.0) for name in self.names]
        else:
            encoded = [each["labels"] for each in self.examples("train")]
            total = len(encoded)
            of = np.sum(encoded, 0) if task["multi_label"] else np.bincount(encoded, minlength=len(self.labels))
            found = (total - of) / of if task["multi_label"] else total / (len(self.labels) * of)
        return [max(1, round(weight * 2**20)) / 2**20 for weight in found]

    @cache  # noqa: B019 - as long as the job
    def examples(self, split: str) -> list[dict]:
        """All examples of a split."""
        return self.encode(self.splits[split])

    def encode(self, rows: list[Row]) -> list[dict]:
        """The examples of some rows."""
        return made.examples(self.run, self.tokenizer, rows, self.labels)
