"""A reward model: one number per prompt and answer, larger for the chosen answer.

In: prompts with two answers. Out: the loss of the Bradley-Terry model (arXiv:2203.02155, equation 1), the share of
pairs whose chosen answer has the larger reward, and the mean margin, all from sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from lockstep.data import conversations
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import IGNORED, MicroBatch, Sums
from lockstep.tasks.answer_pairs import AnswerPairOptions, AnswerPairs, tokens_of
from lockstep.tasks.models import heads
from lockstep.tasks.task import Forward
from lockstep.tasks.text_task import Arrays

if TYPE_CHECKING:
    from torch import Tensor

_LABELS = ["reward"]


class RewardOptions(AnswerPairOptions):
    """The task's own keys in the run file."""

    center: float = Field(
        0.0, ge=0, description="weight of (chosen + rejected)^2 in the loss, which keeps rewards around 0"
    )


class Reward(AnswerPairs):
    """Train a reward: one number per answer."""

    Options = RewardOptions
    head = heads.CLASSIFICATION
    column_keys = ("prompt", "chosen", "rejected")
    default_model = "distilbert/distilbert-base-uncased"
    pipeline = "text-classification"
    mean_sums: ClassVar[Mapping[str, str]] = {"accuracy": "right", "margin": "margin", "reward": "reward"}
    metric_names = tuple(mean_sums)
    reads_conversations = True
    scores_answers = True

    @property
    def config_entries(self) -> dict[str, Any]:
        from lockstep.tasks.models import models

        return models.named(_LABELS)

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Inputs [2B, T]; targets [2B], 1 for a chosen answer and IGNORED for a rejected one."""
        ids, mask, _ = self.answers(columns, rows)
        return {"input_ids": ids, "attention_mask": mask}, np.array([1, IGNORED] * len(rows))

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._judged(outputs.logits, targets)["loss"].sum()

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        logits, pairs = forward(batch.inputs), len(batch.targets) // 2
        sums = {name: values.double().sum() for name, values in self._judged(logits, batch.targets).items()}
        rewards = logits.float().view(-1)[: 2 * pairs].view(pairs, 2)
        return sums | {"rewards": rewards}

    def _judged(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Loss and rewards of each pair, float32 [B]; 0 for a padding pair."""
        from torch.nn.functional import logsigmoid

        pairs = len(targets) // 2
        rewards = logits.float().view(-1)[: 2 * pairs].view(pairs, 2)
        real = (targets[: 2 * pairs : 2] >= 0).float()
        margin = rewards[:, 0] - rewards[:, 1]
        loss = -logsigmoid(margin) + self.options.center * rewards.sum(1).square()
        return {
            "loss": loss * real if pairs else 0 * logits.float().view(-1),
            "right": (margin > 0) * real,
            "margin": margin * real,
            "reward": rewards.mean(1) * real,
            "examples": real,
        }

    @property
    def example_input(self) -> str:
        return "an answer" if self.options.prompt is None else "a prompt\tits answer"

    def input_columns(self) -> tuple[str, ...]:
        options = self.options
        return ("answer",) if options.prompt is None else (options.prompt, "answer")

    def conversation_columns(self) -> tuple[str, ...]:
        return ("messages",) if self.options.conversations else ()

    def predict(self, folder: Path, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        """Yield the `reward` of a prompt with an answer, or of the last answer of a conversation."""
        from lockstep.tasks.models import inference, models

        model, tok = models.exported(self.head, folder, self.run.model)
        options, pads = self.options, {"input_ids": int(tok.pad_token_id)}
        left = models.pads_left(model.config, self.head)
        if not options.conversations:
            conversations.require_template(tok, rows)
        by_template = options.model_copy(update={"conversations": True})

        def tokens(row: Sequence[Any]) -> list[int]:
            if isinstance(row[0], conversations.Question):
                return tokens_of(tok, by_template, None, row[0].messages)[0]
            return tokens_of(tok, options, row[0] if options.prompt else None, row[-1])[0]

        def answer(rows: list[Sequence[Any]]) -> list[dict[str, Any]]:
            ids = [{"input_ids": tokens(row)[: self.run.data.max_length]} for row in rows]
            rewards = model(**inference.padded(ids, pads, left)).logits.view(-1)
            return [{"reward": reward} for reward in rewards.tolist()]

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[Any], answer: Mapping[str, Any]) -> str:
        return f"{answer['reward']:.4f}  " + "\t".join(map(str, row))
