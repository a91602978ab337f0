"""Masked language modelling with any model that `AutoModelForMaskedLM` knows, from scratch or pretrained: predict
masked tokens from those around them.

In: texts (a column, or plain .txt files). Out: loss, perplexity and accuracy of masked tokens, all from sums. Which
tokens are hidden depends on the seed, the step and the example (data/masking.py), in evaluations on the example alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from lockstep.config.run import RunError
from lockstep.config.sections import Section
from lockstep.data import arrow_cache, lm_documents, masking, source, splitting, tokenizer
from lockstep.data.arrow_cache import Columns, Make, Prepared, examples_in
from lockstep.data.batch import TARGETS, MicroBatch, Sums
from lockstep.data.cache import discard
from lockstep.data.token_checks import Limit
from lockstep.tasks.models import heads
from lockstep.tasks.per_token import LossChunk, PerToken
from lockstep.tasks.task import Forward, Generate
from lockstep.tasks.text_task import Arrays, TextData, in_batches

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from torch import Tensor

_BEST = 5  # tokens that `predict` returns per mask


class MaskedLanguageModelingOptions(Section):
    """The task's own keys in the run file."""

    text: str = Field("text", description="column of the text; a .txt file has only this one")
    document: Literal["file", "line"] = Field("file", description="unit of a text in a .txt file")
    packing: bool = Field(True, description="pack texts into full blocks of data.max_length tokens")
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="share of an example's tokens to mask and predict")
    whole_word_mask: bool = Field(False, description="mask all tokens of a word together")
    loss_chunk: LossChunk = None
    samples: int = Field(2, ge=0, description="texts shown after each evaluation, with the predicted words")

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> column name."""
        return {"task.text": self.text}


class MaskedLanguageModeling(PerToken):
    """Prediction of masked tokens."""

    Options = MaskedLanguageModelingOptions
    head = heads.MASKED
    column_keys = ("text",)
    input_keys = ("text",)
    default_model = "distilbert/distilroberta-base"
    small_model = "bert"
    pipeline = "fill-mask"
    draws_targets = True
    reads_token_types = True
    cache_name = ("masked",)
    display_keys = ("samples",)

    @property
    def usage(self) -> str:
        return super().usage.replace("some text", f"some {self.tokenizer.mask_token} text")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def document(cls, options: MaskedLanguageModelingOptions) -> str:
        return options.document

    def holdout_fn(self, data: TextData) -> splitting.Cut:
        return partial(lm_documents.cut, column=self.options.text)

    @classmethod
    def tokenizer_texts(cls, rows: Dataset, options: MaskedLanguageModelingOptions) -> Iterator[list[str]]:
        for batch in in_batches(rows):
            yield [piece for text in batch[options.text] for piece in lm_documents.pieces(text)]

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        from lockstep.tasks.models import config_checks

        _check_tokenizer(tok, self.options)
        config_checks.check_masked(self.run.model, self.head)
        super().check(data, folder, tok)

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, Limit]:
        return {} if self.options.packing else super().limits(read_by)

    def gives_token_types(self, tok: Any) -> bool:
        """Blocks of packed texts have only one type of token."""
        return super().gives_token_types(tok) and (
            not self.options.packing or tokenizer.TokenTypes.of(tok).written == {0}
        )

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        return [self.run.data.max_length, self.options.packing]

    def encode_split(self, data: TextData, split: str, folder: Path, tok: Any, key: str) -> tuple[str, list[int]]:
        column, packed = self.options.text, self.options.packing
        encode = partial(_encode, tok=tok, column=column, size=self.run.data.max_length, packed=packed)
        file, counts = source.encode_by_source(data.splits[split], key, encode)
        if examples_in(file) == 0:
            discard(Path(file))
            raise RunError(
                "LS3060",
                f"task.text: the {split} split of {data.name} has only texts of a single token, so nothing can be "
                "masked",
            )
        return file, counts

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        return {"texts": {split: len(rows) for split, rows in data.splits.items()}}

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        options = self.options
        tok: Any = tokenizer.load(folder, self.run.model.trust_remote_code)

        def make(rows: Dataset) -> pa.RecordBatch:
            if not options.packing:
                return _parts(rows[:][options.text], tok, self.run.data.max_length)
            texts = [each for each, _ in lm_documents.of_texts(rows, tok, options.text, range(len(rows)))]
            return lm_documents.examples(lm_documents.joined(texts, True), self.run.data.max_length)

        return make

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.vocabulary = masking.vocabulary(self.tokenizer)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        return self.collate_at(columns, rows, index, masking.WITHOUT_STEP)

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        return self.collated(columns, rows, index, partial(self._masked, step=step))

    def _masked(self, columns: Columns, rows: np.ndarray, step: int) -> Arrays:
        ids, real, picked = self._picked(columns, rows, step)
        read, hidden = masking.masked(ids, picked, rows, (self.run.seed, step), self.vocabulary)
        return self.with_types({"input_ids": read, "attention_mask": real}), hidden  # [B, T]

    def _picked(self, columns: Columns, rows: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, mask of real tokens, and mask of tokens to predict: [B, T] each."""
        ids, real = columns.ragged("input_ids").padded(rows, int(self.tokenizer.pad_token_id))
        place, options = (self.run.seed, step), self.options
        picked = masking.chosen(
            ids, real, rows, place, options.mlm_probability, self.vocabulary, options.whole_word_mask
        )
        return ids, real, picked

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return self.count_targets_at(columns, rows, masking.WITHOUT_STEP)

    def count_targets_at(self, columns: Columns, rows: np.ndarray, step: int) -> int:
        return int(self._picked(columns, rows, step)[2].sum())

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Metrics per masked token. Perplexity is exp of the loss per masked token given its whole context: comparable
        only between models with the same tokenizer and masking rate, and not with a causal model's."""
        return super().metrics(sums)

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        import torch

        logits = forward({name: values for name, values in batch.inputs.items() if name != TARGETS}).cpu()
        hidden, ids = batch.targets >= 0, batch.inputs["input_ids"]
        token_ids = {
            "text": torch.where(hidden, self.vocabulary.mask, ids),
            "filled in": torch.where(hidden, logits.argmax(-1), ids),
            "right": torch.where(hidden, batch.targets, ids),
        }
        decoded = {name: [self._decode(row) for row in tokens.tolist()] for name, tokens in token_ids.items()}
        return [dict(zip(decoded, each, strict=True)) for each in zip(*decoded.values(), strict=True)]

    def _decode(self, ids: list[int]) -> str:
        """Decode a text with its masks, without other special tokens."""
        specials = {*self.vocabulary.special.tolist()} - {self.vocabulary.mask}
        return str(self.tokenizer.decode([token for token in ids if token not in specials])).strip()

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the text with masks `filled`, and for each of its `masks` the most likely tokens with scores."""
        from lockstep.tasks.models import inference, models

        model, tok = models.exported(self.head, folder, self.run.model)
        most = self.run.data.max_length
        for place, (text,) in enumerate(rows, 1):
            ids = tok(text, truncation=True, max_length=most)["input_ids"]
            if tok.mask_token_id not in ids:
                why = f"within its first {most} tokens" if tok.mask_token in text else "to fill in"
                raise RunError(
                    "LS3061",
                    f"predict: text {place} has no {tok.mask_token} {why}: {text[:60]!r}; write {tok.mask_token} where "
                    "a word is missing",
                )

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            read = [tok(row[0], truncation=True, max_length=most) for row in rows]
            logits = model(**inference.padded(read, models.pads(model, self.head, tok))).logits  # [B, T, V]
            return [_filled(tok, each["input_ids"], logits[i]) for i, each in enumerate(read)]

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        best = ["/".join(f"{t['token']} {t['score']:.3f}" for t in mask[:3]) for mask in answer["masks"]]
        return f"{answer['filled']}  ({'; '.join(best)})"


def _filled(tok: Any, ids: list[int], logits: Tensor) -> dict[str, Any]:
    """The prediction for a text, from its logits [T, V]."""
    ids, masks = list(ids), []
    for place in [place for place, token in enumerate(ids) if token == tok.mask_token_id]:
        scores, best = logits[place].softmax(-1).topk(min(_BEST, logits.shape[-1]))
        ids[place] = int(best[0])
        tokens = [tok.decode([token]).strip() for token in best.tolist()]
        masks.append([{"token": t, "score": s} for t, s in zip(tokens, scores.tolist(), strict=True)])
    return {"filled": str(tok.decode(ids, skip_special_tokens=True)).strip(), "masks": masks}


# -- preparing -------------------------------------------------------------------------------------------------------


def _check_tokenizer(tok: Any, options: MaskedLanguageModelingOptions) -> None:
    """Refuse a tokenizer without a mask token, or without word boundaries if they are needed. Errors: `RunError`."""
    if tok.mask_token_id is None:
        raise RunError(
            "LS3062", "tokenizer: has no mask token; use the tokenizer of an encoder, or train one (tokenizer.train)"
        )
    if options.whole_word_mask and masking.vocabulary(tok).begins is None:
        raise RunError(
            "LS3063",
            "task.whole_word_mask: the words of this tokenizer cannot be identified (supported: wordpiece, "
            "bpe and unigram); remove task.whole_word_mask",
        )


def _encode(dataset: Dataset, key: str, tok: Any, column: str, size: int, packed: bool) -> str:
    """Encode blocks of `size` tokens (packed), or separate texts, long ones in parts with their own special tokens."""
    import pyarrow as pa

    parts = arrow_cache.cuts(dataset.select_columns([column]))
    if packed:
        return lm_documents.write(
            parts, lambda rows: lm_documents.of_texts(dataset, tok, column, rows), size, True, key
        )

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        for _, batch in arrow_cache.batches(dataset.select_columns([column]), rows):
            yield _parts(batch[column], tok, size), len(batch[column])

    return arrow_cache.write_split(key, pa.schema([("input_ids", pa.list_(pa.int32()))]), parts, make, "tokenising")


def _parts(texts: list[str], tok: Any, size: int) -> pa.RecordBatch:
    """Encode separate texts."""
    import pyarrow as pa

    pieces = tok(texts, truncation=True, max_length=size, return_overflowing_tokens=True)["input_ids"]
    return pa.record_batch([pa.array(pieces, pa.list_(pa.int32()))], ["input_ids"])
