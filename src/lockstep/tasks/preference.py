"""Preference learning without a reward model: a causal language model learns to prefer the chosen answer of a pair.

In: prompts with two answers. Out: the loss, the share of pairs whose chosen answer has the larger reward, and the mean
margin, all from sums.
The losses are those of DPO (arXiv:2305.18290, equation 7; label smoothing: its authors' cDPO), IPO (arXiv:2310.12036,
equation 17), SLiC's hinge (arXiv:2305.10425, as in arXiv:2309.06657) and SimPO (arXiv:2405.14734, equation 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.data import conversations, tokenizer
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import IGNORED, MicroBatch, Sums
from lockstep.data.lm_documents import end_of
from lockstep.tasks.answer_pairs import AnswerPairOptions, AnswerPairs, tokens_of
from lockstep.tasks.models import heads
from lockstep.tasks.per_token import losses
from lockstep.tasks.task import Forward, UsesReference
from lockstep.tasks.text_task import Arrays, TextData

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

_LOOKED_AT = 20  # pairs checked for an end token


class PreferenceOptions(AnswerPairOptions):
    """The task's own keys in the run file."""

    loss: Literal["dpo", "ipo", "hinge", "simpo"] = Field(
        "dpo", description="dpo, ipo, hinge or simpo; simpo needs no reference model"
    )
    beta: float = Field(
        0.1, gt=0, description="strength of the penalty for deviating from the reference; scale of simpo"
    )
    gamma: float = Field(0.5, ge=0, description="simpo only: target margin, which is subtracted from d")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo only: assumed share of pairs with swapped labels"
    )
    reference_batch_size: int | None = Field(
        None,
        ge=1,
        description="pairs per batch of the reference pass before training (affects bits); default: 4 micro-batches, "
        "at least 32",
    )
    sample_tokens: int = Field(64, ge=1, description="maximum number of tokens that lockstep predict generates")

    @model_validator(mode="after")
    def _fit(self) -> PreferenceOptions:
        if self.label_smoothing and self.loss != "dpo":
            raise InvalidValue("LS3330", f"label_smoothing applies to the loss dpo, not to {self.loss}; remove it")
        if "gamma" in self.changed_keys and self.loss != "simpo":
            raise InvalidValue("LS3332", f"gamma applies to the loss simpo, not to {self.loss}; remove it")
        if self.reference_batch_size and self.loss == "simpo":
            raise InvalidValue(
                "LS3331", "reference_batch_size applies to a reference model, and simpo uses none; remove it"
            )
        return self


class Preference(AnswerPairs, UsesReference):
    """Train the model to prefer writing the chosen answer."""

    Options = PreferenceOptions
    head = heads.CAUSAL
    reads_conversations = True
    column_keys = ("prompt", "chosen", "rejected")
    answer_name = "written"
    default_model = "openai-community/gpt2"
    pipeline = "text-generation"
    usual_rate = 5e-6
    display_keys = ("sample_tokens",)
    # Reward: beta times the change of an answer's log-probability through training. `accuracy`: share of pairs whose
    # chosen answer has the larger reward.
    mean_sums: ClassVar[Mapping[str, str]] = {
        "accuracy": "right",
        "margin": "margin",
        **{f"reward_{answer}": answer for answer in ("chosen", "rejected")},
    }
    metric_names = tuple(mean_sums)

    def unsupported_keys(self) -> dict[str, str]:
        if self.run.data.stream and self.options.loss != "simpo":
            return {
                "data.stream": "it computes reference outputs of all rows of train before training; use "
                "task.loss=simpo, which needs none, or remove it"
            }
        return {}

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        from lockstep.tasks.models import padding

        super().check(data, folder, tok)
        padding.check_foresight(self.run.model, "causal")

    def answer_notes(self, data: TextData, rows: Dataset, tok: Any) -> list[str]:
        options = self.options
        if not options.conversations:
            return []
        some = rows.select(range(min(len(rows), _LOOKED_AT)))
        prompts = some[options.prompt] if options.prompt else [None] * len(some)
        whole = (tokens_of(tok, options, *each) for each in zip(prompts, some[options.chosen], strict=True))
        how = conversations.Writing(options.prompt or "prompt", options.chat_template)
        learned = (np.asarray(targets) for _, targets in whole)
        return conversations.never_ends(tok, learned, conversations.turn_end(tok, how))

    def checked_entries(self) -> dict[str, Any]:
        from lockstep.tasks.models import model_configs

        return model_configs.causal_entries(self.run.model)

    @property
    def end_tokens(self) -> list[int]:
        how = conversations.Writing(self.options.prompt or "prompt", self.options.chat_template)
        other = conversations.turn_end(self.tokenizer, how) if self.options.conversations else None
        return [token for token in (end_of(self.tokenizer), other) if token is not None]

    @property
    def usage(self) -> str:
        talks, lengths = self.options.conversations, (self.options.sample_tokens, self.run.data.max_length)
        return tokenizer.written_by(super().usage, self.tokenizer, self.chat_template, talks, *lengths)

    @property
    def reference_size(self) -> int:
        """2: the log-probabilities of both answers under the model before training; 0 for SimPO."""
        return 0 if self.options.loss == "simpo" else 2

    @property
    def reference_batch_size(self) -> int | None:
        return self.options.reference_batch_size

    def reference_scores(self, forward: Forward, batch: MicroBatch) -> Tensor:
        return _summed(forward(batch.inputs), batch.targets)[0].double().view(-1, 2)

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Inputs [2B, T] and targets [2B, T + 1]: at each position the next token if it belongs to an answer; in the
        last column the reference log-probability, as the bits of a float64."""
        ids, mask, answer_targets = self.answers(columns, rows)
        before = self.reference_for(columns, rows)  # [B, 2], or None
        last = np.zeros(len(ids)) if before is None else before.reshape(-1)
        targets = np.full((len(ids), ids.shape[1] + 1), IGNORED)
        targets[:, :-2], targets[:, -1] = answer_targets[:, 1:], last.view(np.int64)
        return {"input_ids": ids, "attention_mask": mask}, targets

    def targets_in_batch(self, targets: Tensor) -> Tensor:
        return (targets[:, :-1] >= 0).any(1).sum() // 2

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        judged = self._judged(outputs.logits, targets)
        return (judged["loss"] * judged["real"]).sum()

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        import torch

        judged = self._judged(forward(batch.inputs), batch.targets)
        real = judged.pop("real")
        sums = {name: (values.double() * real).sum() for name, values in judged.items()}
        rewards = torch.stack([judged["chosen"], judged["rejected"]], 1)  # [B, 2]
        return sums | {"examples": real.sum().double()} | {"rewards": rewards}

    def _judged(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Per pair, float32 [B]: loss, rewards of both answers, and whether the pair is `real`."""
        import torch
        from torch.nn.functional import logsigmoid

        options, pairs = self.options, len(targets) // 2
        logprobs, count = _summed(logits, targets)
        real = (count > 0)[: 2 * pairs].view(pairs, 2).all(1)
        logprobs, count = logprobs[: 2 * pairs].view(pairs, 2), count[: 2 * pairs].view(pairs, 2).clamp(min=1)
        first = targets[: 2 * pairs, -1].contiguous().view(torch.float64).float().view(pairs, 2)
        first = torch.where(real[:, None], first, torch.zeros_like(first))
        if options.loss in ("ipo", "simpo"):  # mean per token
            logprobs, first = logprobs / count, first / count
        rewards = options.beta * (logprobs - first)
        margin = rewards[:, 0] - rewards[:, 1]
        if options.loss == "dpo":
            smooth = options.label_smoothing
            loss = -(1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
        elif options.loss == "ipo":
            loss = (margin / options.beta - 1 / (2 * options.beta)).square()
        elif options.loss == "hinge":
            loss = torch.relu(1 - margin)
        else:
            loss = -logsigmoid(margin - options.gamma)
        results = {
            "loss": loss + 0 * logits.sum() if pairs == 0 else loss,
            "right": (margin > 0).float(),
            "margin": margin,
            "chosen": rewards[:, 0],
            "rejected": rewards[:, 1],
        }
        return results | {"real": real}

    @property
    def example_input(self) -> str:
        if self.options.conversations:
            return "a message of the user"
        return "the beginning of an answer" if self.options.prompt is None else "a prompt"

    def input_columns(self) -> tuple[str, ...]:
        return (self.options.prompt or "prompt",)

    def conversation_columns(self) -> tuple[str, ...]:
        return self.input_columns() if self.options.conversations else ()

    def predict(self, folder: Path, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        """Yield the greedy continuation of the prompt as `written`."""
        from lockstep.tasks.models import inference, models

        options = self.options
        model, tok = models.exported(self.head, folder, self.run.model)
        how = conversations.Writing(options.prompt or "prompt", options.chat_template)
        most = self.run.data.max_length, options.sample_tokens
        return inference.continuations(model, tok, rows, how if options.conversations else None, *most)


def _summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's targets, float32 [2B], and their number, int64 [2B]. `logits` [2B, T, V]; `targets`
    [2B, T + 1], whose last column is not a target."""
    labels = targets[:, :-1]
    return -losses(logits, labels).sum(1), (labels >= 0).sum(1)
