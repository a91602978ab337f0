"""Ratings: a text and a whole number of stars; right, and how far off.

In: a column of texts and a column of integers 0..levels-1. Out: loss, accuracy and mean distance, all from sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from lockstep import RunError
from lockstep.config.sections import Section
from lockstep.data import tokenizer, usable_rows
from lockstep.data.arrow_cache import Columns
from lockstep.tasks.models import heads
from lockstep.tasks.task import Forward
from lockstep.tasks.text_task import Arrays, Encoder, TextTask

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums


class RatingOptions(Section):
    """The task's own keys in the run file."""

    text: str = Field("text", description="column of the text")
    stars: str = Field("stars", description="column of the rating, 0 to levels - 1")
    levels: int = Field(5, ge=2, description="how many different ratings there are")

    @property
    def text_columns(self) -> dict[str, str]:
        return {"task.text": self.text, "task.stars": self.stars}


class Rating(TextTask):
    """One whole number a text."""

    Options = RatingOptions
    head = heads.CLASSIFICATION
    pipeline = "text-classification"  # the Hub's name for it, in the model card
    cache_name = ("rating", 1)  # a new number makes tokens in the cache unused
    column_keys = ("text", "stars")  # what `lockstep init` looks for, by these names
    column_aliases = {"text": ("review", "text"), "stars": ("stars", "rating")}  # noqa: RUF012 - changed by nobody
    default_model = "distilbert/distilbert-base-uncased"

    # The steps of `prepare`, before any process group exists, by one process a machine.
    @classmethod
    def valid_rows(cls, rows: Dataset, options: Any, split: str, name: str, drop: bool) -> Dataset:
        usable_rows.check_columns(rows, options.text_columns, split, name)
        rows = usable_rows.complete(rows, options.text_columns, split, name, drop)
        if not all(isinstance(s, int) and 0 <= s < options.levels for s in rows[options.stars]):
            raise RunError(f"task.stars: the {split} split holds something other than 0..{options.levels - 1}")
        return rows

    @classmethod
    def dedup_columns(cls, options: Any) -> tuple[list[str], list[str]]:
        return [options.text], [options.stars]

    def key_parts(self, data: Any, tok: Any, rows: Dataset | None) -> list[Any]:
        return [self.run.data.max_length, self.options.model_dump()]

    def encoder(self, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        import datasets

        options, known = self.options, tokenizer.load(folder)
        kinds = {"input_ids": datasets.List(datasets.Value("int32")), "stars": datasets.Value("int64")}

        def encoded(rows: dict[str, list]) -> dict[str, list]:
            ids = known(rows[options.text], truncation=True, max_length=self.run.data.max_length)["input_ids"]
            return {"input_ids": [i or [known.pad_token_id] for i in ids], "stars": rows[options.stars]}

        return encoded, datasets.Features(kinds)

    def facts(self, data: Any, files: Any) -> dict[str, Any]:
        return {"labels": [str(i) for i in range(self.options.levels)]}

    # In every process.
    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models

        return models.sequence_classifier(self.model_choice, self.tokenizer, self.prepared.facts["labels"], empty)

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        return self.padded_texts(columns, rows), columns.flat("stars")[rows].astype(np.int64)  # [B, T], [B]

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return len(rows)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), targets, reduction="sum")  # IGNORED counts for nothing

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        from torch.nn.functional import cross_entropy

        logits = forward(batch.inputs).float()  # [B, C]
        real = batch.targets >= 0
        off = (logits[real].argmax(dim=-1) - batch.targets[real]).abs()
        return {
            "examples": real.sum().double(),  # `evaluate` checks it against the length of the split
            "loss": cross_entropy(logits, batch.targets, reduction="sum").double(),
            "right": (off == 0).sum().double(),
            "off": off.sum().double(),
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = float(sums["examples"])
        return {
            "loss": float(sums["loss"]) / count,
            "accuracy": float(sums["right"]) / count,
            "distance": float(sums["off"]) / count,
        }
