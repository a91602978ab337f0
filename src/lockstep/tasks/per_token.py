"""Base of tasks with a target for each token of one text: the next token, a tag, or IGNORED.

In: columns `input_ids` and `targets` of equal lengths, and `count`, the number of targets of an example that are not
IGNORED. Out: padded micro-batches, and sums over targets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.batch import IGNORED, MicroBatch, Sums
from lockstep.tasks import own_metrics
from lockstep.tasks.task import Forward, GivesPredictions, Predicts, Streams
from lockstep.tasks.text_task import Arrays, TextTask

if TYPE_CHECKING:
    from torch import Tensor, nn


LossChunk = Annotated[
    Annotated[int, Field(ge=1, strict=True)] | None,
    Field(
        description="tokens whose logits are in memory at once: computes the loss in chunks, without the "
        "whole logits matrix; default: all tokens of a micro-batch"
    ),
]


class TokenLosses(TextTask):
    """A task with a cross-entropy over targets [B, T], each predicted by the logits at its position."""

    plugin = "tasks"  # a base: it has no name in a run file

    chunks_loss = True
    smoothing: float = 0.0  # label smoothing, in training

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.loss_chunk = self.options.loss_chunk if self.chunks_loss else None

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return outputs.loss if self.loss_chunk else summed_losses(outputs.logits, targets, self.smoothing)

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.loss_chunk:
            return outputs.loss, of_examples(outputs.logits)
        each = losses(outputs.logits, targets, self.smoothing)
        return each.sum(), of_examples(each)

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        logits = forward(batch.inputs).float()
        if self.loss_chunk:
            from lockstep.tasks.models.chunked_loss import scored

            return scored(logits, batch.targets)
        return self.sums(logits, batch.targets)

    def sums(self, logits: Tensor, targets: Tensor) -> Sums:
        """Loss, examples, targets and correctly predicted targets of float32 logits [B, T, V]."""
        real = targets >= 0  # [B, T]
        return {
            "loss": summed_losses(logits, targets).double(),
            "examples": real.any(1).sum().double(),
            "targets": real.sum().double(),
            "right": ((logits.argmax(-1) == targets) & real).sum().double(),
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        loss, accuracy = (float(sums[name]) / float(sums["targets"]) for name in ("loss", "right"))
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": accuracy}

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import chunked_loss

        return chunked_loss.install(super().model(empty), self.loss_chunk, self.smoothing)


class PerToken(TokenLosses, Streams, Predicts, GivesPredictions):
    """A task with one target per input token."""

    plugin = "tasks"  # a base: it has no name in a run file

    metric_inputs = ("predictions", "labels")
    targets_by_token = True
    metric_names: tuple[str, ...] = ("accuracy", "perplexity")

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        return self.padded_texts(columns, rows), columns.ragged("targets").padded(rows, IGNORED)[0]  # [B, T]

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return int(columns.flat("count")[rows].sum())

    def score_at(self, forward: Forward, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """The sums, counting rows without a target as examples. With functions in `metrics`, also the most likely token
        and the target at each position: int32 [B, longest]."""
        import torch

        examples = {"examples": torch.tensor(float(len(rows)), dtype=torch.float64, device=batch.targets.device)}
        if not self.per_example_outputs:
            return self.score(forward, batch) | examples
        logits, width = forward(batch.inputs).float(), own_metrics.longest(columns)
        predicted = logits.argmax(-1).masked_fill(batch.targets < 0, own_metrics.NOTHING)
        labels = batch.targets.clamp(min=own_metrics.NOTHING)
        gathered = {"predictions": own_metrics.as_wide(predicted, width), "labels": own_metrics.as_wide(labels, width)}
        return self.sums(logits, batch.targets) | gathered | examples

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids: int64 [N, longest], -1 where there is no target."""
        return sums["predictions"].numpy().astype(np.int64), sums["labels"].numpy().astype(np.int64)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        if self.loss_chunk:
            raise RunError(
                "LS3320",
                "metrics: with task.loss_chunk no logits are kept, so predicted tokens are not available; "
                "remove one of the two",
            )
        labels = np.where(np.arange(12) % 4 == 0, own_metrics.NOTHING, np.arange(12) % len(self.tokenizer)).reshape(
            4, 3
        )
        return labels.copy(), labels


def losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each target [B, T], float32, from logits [B, T, V]; 0 where there is no target."""
    from lockstep.tasks.cross_entropy import cross_entropy

    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing)
    return each.view(targets.shape)


def of_examples(each: Tensor | None) -> Tensor | None:
    """Sum the losses of targets [B, T] per example: [B], without gradient. None stays None."""
    return None if each is None else each.detach().sum(1)


def summed_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum of `losses`."""
    from lockstep.tasks.cross_entropy import cross_entropy

    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats, clamped at 700 to avoid overflow."""
    return math.exp(min(loss, 700.0))
