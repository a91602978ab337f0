"""Masked language modelling with any model that `AutoModelForMaskedLM` knows: hidden tokens from those around them,
from scratch or going on from a pretrained model.

In: texts (a column, or plain .txt files). Out: loss, perplexity and accuracy of masked tokens, all from sums. Which
tokens are hidden depends on the seed, the step and the example (data/masking.py), in evaluations on the example alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lockstep.config.run import Run, RunError
from lockstep.data import (
    arrow_cache,
    chunked_tokenization,
    lm_documents,
    masking,
    missing_values,
    mixed,
    packing,
    source,
    splitting,
    stream,
    tokenizer,
)
from lockstep.data.cache import discard
from lockstep.data.stream import Stream
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import VERSION, Columns, Make, Prepared, content, digest, examples_in
from lockstep.tasks.per_token import PerToken, perplexity
from lockstep.tasks.task import spread_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch
    from lockstep.tasks.models.decoding import Decoding

_BEST = 5  # tokens that `predict` gives for a mask


class MaskedLanguageModelingOptions(BaseModel):
    """The task's own keys in the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str = Field("text", description="column of the text; a .txt file has this one only")
    document: Literal["file", "line"] = Field("file", description="what of a .txt file is one text")
    packing: bool = Field(
        True, description="texts follow each other in blocks of data.max_length tokens that are all full"
    )
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="share of an example's tokens that are to be foretold")
    whole_word_mask: bool = Field(False, description="all tokens of a word are masked together, or none")
    loss_chunk: Annotated[int, Field(ge=1, strict=True)] | Literal["liger"] | None = Field(
        None,
        description="tokens whose logits are in memory at once: the loss in chunks, without the matrix of logits; "
        "liger: by Liger-Kernel, on CUDA; default: all tokens of a micro-batch",
    )
    samples: int = Field(2, ge=0, description="texts to show after each evaluation, with what is filled in")


class MaskedLanguageModeling(PerToken):
    """The hidden tokens of a text."""

    Options = MaskedLanguageModelingOptions
    head = "masked"
    column_keys = ("text",)
    default_model = "distilbert/distilroberta-base"
    pipeline = "fill-mask"
    display_keys = ("samples",)

    @property
    def usage(self) -> str:
        return super().usage.replace("some text", f"some {self.tokenizer.mask_token} text")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        from lockstep.tasks.models import models

        options = MaskedLanguageModelingOptions.model_validate(run.task.options)
        asked = {"task.text": options.text}
        data = source.load(run.data, run.seed, plain=options.document, columns=asked, tokens=TokenCounts.of(run))
        splits = {
            s: missing_values.texts(rows, asked, s, data.name, run.data.drop_missing) for s, rows in data.splits.items()
        }
        cut = partial(lm_documents.cut, column=options.text)
        streamed = cls.stream(run).found(splits, [options.text]) if run.data.stream else None
        splits, left_out = splitting.deduplicate_and_split(data, splits, run, [options.text], [], cut)
        hashes = {split: content(rows, [options.text]) for split, rows in splits.items()}
        if streamed is not None:
            folder = streamed.tokenizer(run, partial(_batches, column=options.text))
        else:
            folder = tokenizer.prepare(run, _batches(splits["train"], options.text), hashes["train"])
        _check_tokenizer(tokenizer.load(str(folder), run.model.trust_remote_code), options)
        models.check(run, "masked")
        known: Any = tokenizer.load(str(folder), run.model.trust_remote_code)
        files = {}
        for split, rows in splits.items():
            key = digest("masked", VERSION, hashes[split], folder.name, run.data.max_length, options.packing)
            encode = partial(_encode, tok=known, column=options.text, size=run.data.max_length, packed=options.packing)
            files[split], counts = mixed.each_alone(rows, key, encode)
            if examples_in(files[split]) == 0:
                discard(Path(files[split]))
                raise RunError(
                    f"task.text: the {split} split of {data.name} is one token long: there is nothing to mask"
                )
            if counts:
                left_out["sources"]["rows"][split] = counts
        texts = {split: len(rows) for split, rows in splits.items()}
        if streamed is not None:
            key = digest("masked", VERSION, folder.name, run.data.max_length, options.packing)
            index = streamed.index(cls.example_maker(run, str(folder), {}), key)
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
            texts["train"] = stream.about(index)["rows"]
        facts = {"source": data.name, "texts": texts} | left_out
        return Prepared(digest(stream.names_of(files)), files, str(folder), facts)

    @classmethod
    def stream(cls, run: Run) -> Stream:
        options = MaskedLanguageModelingOptions.model_validate(run.task.options)
        asked = {"task.text": options.text}
        whole = partial(missing_values.texts, columns=asked, split="train", drop=run.data.drop_missing)
        return Stream(run.data, asked, lambda rows, name: whole(rows, name=name), options.document)

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        options = MaskedLanguageModelingOptions.model_validate(run.task.options)
        tok: Any = tokenizer.load(folder, run.model.trust_remote_code)

        def make(rows: Dataset) -> pa.RecordBatch:
            if not options.packing:
                return _parts(rows[:][options.text], tok, run.data.max_length)
            found = [each for each, _ in lm_documents.of_texts(rows, tok, options.text, range(len(rows)))]
            return packing.examples(packing.joined(found, True), run.data.max_length)

        return make

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.loss_chunk = self.options.loss_chunk
        self.vocabulary = masking.vocabulary(self.tokenizer)

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import chunked_loss, models

        return chunked_loss.install(models.build(self.run, "masked", self.tokenizer, empty), self.loss_chunk)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        return self.collate_at(columns, rows, index, masking.WITHOUT_STEP)

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        import torch

        from lockstep.data.batch import IGNORED, MicroBatch
        from lockstep.tasks.models.chunked_loss import with_targets

        blank = len(rows) == 0
        rows = np.zeros(1, dtype=np.int64) if blank else rows
        ids, real, picked = self._picked(columns, rows, step)
        read, wanted = masking.masked(ids, picked, rows, (self.run.seed, step), self.vocabulary)
        targets = torch.full(wanted.shape, IGNORED) if blank else torch.from_numpy(wanted)  # [B, T]
        inputs = {"input_ids": torch.from_numpy(read), "attention_mask": torch.from_numpy(real)}
        return MicroBatch(index, with_targets(inputs, targets, self.loss_chunk), targets)

    def _picked(self, columns: Columns, rows: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, which of them are real, and which are to be foretold: [B, T] each."""
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

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Perplexity is exp of the loss per masked token, each seen with its whole text around it: not that of a model
        that writes, and to be compared between models of one tokenizer and one share of masks alone."""
        loss = float(sums["loss"]) / float(sums["targets"])
        accuracy = float(sums["right"]) / float(sums["targets"])
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": accuracy}

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        import torch

        from lockstep.data.batch import TARGETS

        columns = self.splits["validation"]
        rows = spread_rows(columns, self.options.samples)
        if len(rows) == 0:
            return []
        batch = self.collate(columns, rows, 0)
        logits = forward({name: values for name, values in batch.inputs.items() if name != TARGETS}).cpu()
        hidden, ids = batch.targets >= 0, batch.inputs["input_ids"]
        shown = {
            "text": torch.where(hidden, self.vocabulary.mask, ids),
            "filled in": torch.where(hidden, logits.argmax(-1), ids),
            "right": torch.where(hidden, batch.targets, ids),
        }
        said = {name: [self._said(row) for row in tokens.tolist()] for name, tokens in shown.items()}
        return [dict(zip(said, each, strict=True)) for each in zip(*said.values(), strict=True)]

    def _said(self, ids: list[int]) -> str:
        """A text with its masks, without other special tokens."""
        left = {*self.vocabulary.special.tolist()} - {self.vocabulary.mask}
        return str(self.tokenizer.decode([token for token in ids if token not in left])).strip()

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        return (MaskedLanguageModelingOptions.model_validate(run.task.options).text,)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """The text `filled` in, and for each of its `masks` the likeliest tokens with their scores."""
        from lockstep.tasks.models import batched_inference, models

        model, tok = models.exported("masked", folder, run)
        most = run.data.max_length
        for place, (text,) in enumerate(rows, 1):
            ids = tok(text, truncation=True, max_length=most)["input_ids"]
            if tok.mask_token_id not in ids:
                why = f"within its first {most} tokens" if tok.mask_token in text else "to fill in"
                raise RunError(
                    f"predict: text {place} has no {tok.mask_token} {why}: {text[:60]!r}; write {tok.mask_token} where "
                    "a word is missing"
                )

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            read = [tok(row[0], truncation=True, max_length=most) for row in rows]
            logits = model(**batched_inference.padded(read, {"input_ids": int(tok.pad_token_id)})).logits  # [B, T, V]
            return [_filled(tok, each["input_ids"], logits[i]) for i, each in enumerate(read)]

        return batched_inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        best = ["/".join(f"{t['token']} {t['score']:.3f}" for t in mask[:3]) for mask in answer["masks"]]
        return f"{answer['filled']}  ({'; '.join(best)})"

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run)


def _filled(tok: Any, ids: list[int], logits: Tensor) -> dict[str, Any]:
    """A text's answer, from its logits [T, V]."""
    ids, masks = list(ids), []
    for place in [place for place, token in enumerate(ids) if token == tok.mask_token_id]:
        scores, best = logits[place].softmax(-1).topk(min(_BEST, logits.shape[-1]))
        ids[place] = int(best[0])
        tokens = [tok.decode([token]).strip() for token in best.tolist()]
        masks.append([{"token": t, "score": s} for t, s in zip(tokens, scores.tolist(), strict=True)])
    return {"filled": str(tok.decode(ids, skip_special_tokens=True)).strip(), "masks": masks}


# -- preparing -------------------------------------------------------------------------------------------------------


def _check_tokenizer(tok: Any, options: MaskedLanguageModelingOptions) -> None:
    """Errors: `RunError`."""
    if tok.mask_token_id is None:
        raise RunError("tokenizer: it has no mask token; use that of an encoder, or train one (tokenizer.train)")
    if options.whole_word_mask and masking.vocabulary(tok).begins is None:
        raise RunError(
            "task.whole_word_mask: which tokens of this tokenizer make a word is not known (it is of wordpiece, bpe "
            "and "
            "unigram); leave it out"
        )


def _batches(train: Dataset, column: str) -> Iterator[list[str]]:
    """The texts that a tokenizer is trained on."""
    for start in range(0, len(train), 1000):
        yield [piece for text in train[start : start + 1000][column] for piece in chunked_tokenization.pieces(text)]


def _encode(dataset: Dataset, key: str, tok: Any, column: str, size: int, packed: bool) -> str:
    """Blocks of `size` tokens; or a text by itself, a long one in parts that each begin and end as texts do."""
    import pyarrow as pa

    parts = arrow_cache.cuts(dataset.select_columns([column]))
    if packed:
        return packing.write(parts, lambda rows: lm_documents.of_texts(dataset, tok, column, rows), size, True, key)

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        for _, batch in arrow_cache.batches(dataset.select_columns([column]), rows):
            yield _parts(batch[column], tok, size), len(batch[column])

    return arrow_cache.write_split(key, pa.schema([("input_ids", pa.list_(pa.int32()))]), parts, make, "tokenising")


def _parts(texts: list[str], tok: Any, size: int) -> pa.RecordBatch:
    """Texts by themselves."""
    import pyarrow as pa

    found = tok(texts, truncation=True, max_length=size, return_overflowing_tokens=True)["input_ids"]
    return pa.record_batch([pa.array(found, pa.list_(pa.int32()))], ["input_ids"])
