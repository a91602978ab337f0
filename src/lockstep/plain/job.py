"""The inputs of the plain reference: rows, examples, labels and tokenizer of a run.

In: a run file as a mapping, with its defaults filled in, and a tokenizer's folder. Out: a `Plain`, which reads each
part once, on first use.
"""

from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.plain import module
from lockstep.plain.examples import encode_rows, values_of_labels
from lockstep.plain.rows import UNFILTERED_TRAIN, NotCovered, Row, read_splits


class Plain:
    """The inputs of one run. `rows`: raw rows by split, if already read. `labels`: the label values in the order of
    their class indices, if the rows do not contain all of them."""

    tokenizer: Any = None  # of text tasks
    target_tokenizer: Any = None  # of translation targets: `tokenizer`, or their own
    processor: Any = None  # of image tasks
    reference: Any = None  # of preference tasks: the model before training
    libraries = False  # compute losses by the libraries that define them; importing them takes seconds

    def __init__(
        self, run: dict, tokenizer: str, rows: dict[str, list[Row]] | None = None, labels: list[Any] | None = None
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.run, own = run, Path(tokenizer) / "target"
        self.__dict__ |= {k: v for k, v in (("splits", rows), ("labels", labels)) if v is not None}
        if run["task"]["name"] == "image_classification":
            self.processor = AutoImageProcessor.from_pretrained(tokenizer, backend="pil")
        elif not self.own_model:
            trusted = {"trust_remote_code": run["model"]["trust_remote_code"]}
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, **trusted)
            self.target_tokenizer = AutoTokenizer.from_pretrained(own, **trusted) if own.is_dir() else self.tokenizer

    @property
    def own_model(self) -> bool:
        """Whether model, data and loss are the user's own."""
        return bool(self.run["task"]["name"] == "module")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the model before training (the reference of DPO)."""
        return bool(self.run["task"]["name"] == "preference")

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The rows of all splits; for the task `module`, the items of the user's data sets."""
        return module.read_splits(self.run) if self.own_model else read_splits(self.run, self.tokenizer)

    @cached_property
    def labels(self) -> list[Any]:
        """The label values, in the order of their class indices."""
        return values_of_labels(self.run, self.splits.get(UNFILTERED_TRAIN, self.splits["train"]))

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
        else:  # balanced, as in scikit-learn
            encoded = [each["labels"] for each in self.examples("train")]
            of = np.sum(encoded, 0) if task["multi_label"] else np.bincount(encoded, minlength=len(self.labels))
            weights = (len(encoded) - of) / of if task["multi_label"] else len(encoded) / (len(of) * of)
        return [max(1, round(weight * 2**20)) / 2**20 for weight in weights]

    @cache  # noqa: B019 - lives as long as the job
    def examples(self, split: str) -> list[dict]:
        """Return all examples of a split. Errors: `NotCovered`."""
        if self.run["data"]["stream"] and split == "train" and self.run["task"].get("packing"):
            raise NotCovered("data.stream: blocks hold texts of one chunk of a shard, which only the run's index knows")
        return self.encode(self.splits[split])

    encode = encode_rows
