"""What a run is made of for the plain path: its rows, examples, labels and tokenizer.

In: a run file as a mapping, with its defaults filled in, and a tokenizer's folder. Out: a `Plain`, which reads what it
is asked for, once.
"""

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.plain import module
from lockstep.plain.examples import encode_rows, values_of_labels
from lockstep.plain.rows import WHOLE, NotCovered, Row, read_splits


class Plain:
    """A run, read plainly. `rows`: raw rows by split, where the caller has read them; `labels`: the values of labels in
    the order of their codes, where those rows do not show all."""

    tokenizer: Any = None  # of a task of texts
    target_tokenizer: Any = None  # of a translation's targets: that of the texts, or their own
    processor: Any = None  # of a task of images
    reference: Any = None  # of preferences: the model before training
    libraries = False  # whether losses are computed by the libraries that define them, whose imports take seconds

    def __init__(
        self, run: dict, tokenizer: str, rows: dict[str, list[Row]] | None = None, labels: list[Any] | None = None
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.run, own = run, Path(tokenizer) / "target"
        self.__dict__ |= {k: v for k, v in (("splits", rows), ("labels", labels)) if v is not None}
        if run["task"]["name"] == "image_classification":
            self.processor = AutoImageProcessor.from_pretrained(tokenizer, backend="pil")
        elif run["task"]["name"] != "module":
            trusted = {"trust_remote_code": run["model"]["trust_remote_code"]}
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, **trusted)
            self.target_tokenizer = AutoTokenizer.from_pretrained(own, **trusted) if own.is_dir() else self.tokenizer

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The rows of all splits; the items of data sets that are the user's."""
        own = self.run["task"]["name"] == "module"
        return module.read_splits(self.run) if own else read_splits(self.run, self.tokenizer)

    @cached_property
    def labels(self) -> list[Any]:
        """The values of labels, in the order of their codes."""
        return values_of_labels(self.run, self.splits.get(WHOLE, self.splits["train"]))

    @cached_property
    def class_weights(self) -> list[float] | None:
        """The weight of each label in the loss, rounded to 2^-20."""
        task, setting = self.run["task"], self.run["task"].get("class_weights")
        if not setting:
            return None
        if isinstance(setting, dict):
            known = (
                task["label"]
                if isinstance(task["label"], list)
                else sorted(v for v in self.labels if isinstance(v, int))
            )
            names = dict(zip(known, task["label_names"] or (), strict=False))
            weights: Any = [setting.get(names.get(value, str(value)), 1.0) for value in self.labels]
        else:  # balanced, as of scikit-learn
            encoded = [each["labels"] for each in self.examples("train")]
            of = np.sum(encoded, 0) if task["multi_label"] else np.bincount(encoded, minlength=len(self.labels))
            weights = (len(encoded) - of) / of if task["multi_label"] else len(encoded) / (len(of) * of)
        return [max(1, round(weight * 2**20)) / 2**20 for weight in weights]

    @cache  # noqa: B019 - as long as the job
    def examples(self, split: str) -> list[dict]:
        """All examples of a split. Errors: `NotCovered`."""
        if self.run["data"]["stream"] and split == "train" and self.run["task"].get("packing"):
            raise NotCovered(
                "data.stream: blocks hold texts of one chunk of a shard, which the run's index alone knows"
            )
        return self.encode(self.splits[split])

    encode = encode_rows
