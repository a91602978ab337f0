"""What a run is made of for the plain path: its rows, examples, labels and tokenizer.

In: a run file as a mapping, and a tokenizer's folder. Out: a `Plain`, which reads what it is asked for, once.
"""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.plain import examples as made
from lockstep.plain import module
from lockstep.plain.rows import NotCovered, Row, read_splits


class Plain:
    """A run, read plainly. `rows`: raw rows by split, where the caller has read them; `labels`: the values of labels in
    the order of their codes, where those rows do not show all."""

    tokenizer: Any = None  # of a task of texts
    processor: Any = None  # of a task of images
    target_tokenizer: Any = None
    reference: Any = None  # of preferences: the model before training

    def __init__(
        self, run: dict, tokenizer: str, rows: dict[str, list[Row]] | None = None, labels: list[Any] | None = None
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.run, own = run, Path(tokenizer) / "target"  # of a translation's targets, where they have one of their own
        if rows is not None:
            self.splits = rows
        if labels is not None:
            self.labels = labels
        if run["task"]["name"] == "image_classification":
            self.run = run | {"task": run["task"] | {"multi_label": False, "regression": False}}
            self.processor = AutoImageProcessor.from_pretrained(tokenizer, backend="pil")
        elif run["task"]["name"] != "module":
            trusted = {"trust_remote_code": run["model"]["trust_remote_code"]}
            self.tokenizer = self.target_tokenizer = AutoTokenizer.from_pretrained(tokenizer, **trusted)
            if own.is_dir():
                self.target_tokenizer = AutoTokenizer.from_pretrained(own, **trusted)

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The rows of all splits; the items of data sets that are the user's."""
        module_run = self.run["task"]["name"] == "module"
        return module.read_splits(self.run) if module_run else read_splits(self.run, self.tokenizer)

    @cached_property
    def labels(self) -> list[Any]:
        """The values of labels, in the order of their codes."""
        return made.values_of_labels(self.run, self.splits["train"])

    @property
    def outputs(self) -> int:
        """Numbers that a classifier has to give of a text."""
        regression = self.run["task"].get("regression")
        return len(self.encode(self.splits["train"][:1])[0]["labels"]) if regression else len(self.labels) or 1

    @property
    def problem(self) -> Any:
        """What transformers calls the loss of a classifier."""
        kinds = {"regression": "regression", "multi_label": "multi_label_classification"}
        return next((kinds[key] for key in kinds if self.run["task"].get(key)), "single_label_classification")

    @cached_property
    def class_weights(self) -> list[float] | None:
        """The weight of each label in the loss, rounded to 2^-20."""
        task, wanted = self.run["task"], self.run["task"].get("class_weights")
        if not wanted:
            return None
        if isinstance(wanted, dict):
            weights: Any = [wanted.get(name, 1.0) for name in task["label_names"] or map(str, self.labels)]
        else:  # balanced, as of scikit-learn
            encoded = [each["labels"] for each in self.examples("train")]
            of = np.sum(encoded, 0) if task["multi_label"] else np.bincount(encoded, minlength=len(self.labels))
            weights = (len(encoded) - of) / of if task["multi_label"] else len(encoded) / (len(of) * of)
        return [max(1, round(weight * 2**20)) / 2**20 for weight in weights]

    @property
    def pooling(self) -> str:
        """How hidden states become a vector: as the run file or the model's own files say, else their mean."""
        from transformers.utils import cached_file

        source, quiet = self.run["model"]["source"], {"_raise_exceptions_for_missing_entries": False}
        if self.run["task"]["pooling"] or not source:
            return self.run["task"]["pooling"] or "mean"
        file = cached_file(source, "1_Pooling/config.json", revision=self.run["model"]["revision"], **quiet)
        modes = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
        ways = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last_token"}
        return next((way for mode, way in ways.items() if modes.get(mode)), "mean")

    @cache  # noqa: B019 - as long as the job
    def examples(self, split: str) -> list[dict]:
        """All examples of a split. Errors: `NotCovered`."""
        if self.run["data"]["stream"] and split == "train" and made.packs(self.run["task"]):
            raise NotCovered(
                "data.stream: blocks hold texts of one chunk of a shard, which the run's index alone knows"
            )
        return self.encode(self.splits[split])

    def encode(self, rows: list[Row]) -> list[dict]:
        """The examples of some rows."""
        return made.examples(self, rows)
