"""Causal language modelling with any model that `AutoModelForCausalLM` knows: each token from those before it.

In: texts (a column, or plain .txt files), prompts with responses, or conversations. Out: loss and perplexity per token,
per byte and per word of the text, all from sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config import key_aliases
from lockstep.config.run import Run, RunError
from lockstep.data import (
    arrow_cache,
    chunked_tokenization,
    conversations,
    lm_documents,
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
from lockstep.tasks.abilities import Generates
from lockstep.tasks.models.language_options import LanguageModelingOptions
from lockstep.tasks.per_token import PerToken, perplexity

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding

_SIZES = ("bytes", "words")  # of texts


class LanguageModeling(PerToken, Generates):
    """The next token of a text."""

    Options = LanguageModelingOptions
    head = "causal"
    column_keys = ("text",)
    default_model = "openai-community/gpt2"
    pipeline = "text-generation"
    display_keys = ("samples", "sample_prompt", "sample_tokens", "temperature")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        options = LanguageModelingOptions.model_validate(run.task.options)
        asked = options.columns or options.writing.columns
        data = source.load(run.data, run.seed, options.document, asked, TokenCounts.of(run))
        splits = {s: _whole(found, options, s, data.name, run.data.drop_missing) for s, found in data.splits.items()}
        columns = list(asked.values())
        rows = cls.stream(run).found(splits, columns) if run.data.stream else None
        cut = partial(lm_documents.cut, column=options.text if list(asked) == ["task.text"] else None)
        splits, left_out = splitting.deduplicate_and_split(data, splits, run, columns, [], cut)
        hashes = {split: content(dataset, columns) for split, dataset in splits.items()}
        if rows is not None:
            folder = rows.tokenizer(run, partial(_batches, options=options), generative=True)
        else:
            folder = tokenizer.prepare(run, _batches(splits["train"], options), hashes["train"], generative=True)
        tok = tokenizer.load(str(folder), run.model.trust_remote_code)
        written: list[Any] = []
        if options.messages is not None:
            if not (options.chat_template or tok.chat_template):
                raise RunError("task.messages: the tokenizer has no chat template; give task.chat_template")
            if not tok.is_fast:
                raise RunError("task.messages: the tokenizer does not tell which characters its tokens stand for")
            written = tokenizer.template_of(tok, options.chat_template)
        _check_model(run, options)
        files: dict[str, str] = {}
        names: list[tuple[str, str]] = []
        for split, dataset in splits.items():
            values = options.values(dataset)
            key = digest("language modelling", VERSION, hashes[split], folder.name, values, options.packed, *written)
            own = digest(f"with openings{' and what was cut' * options.cut}", key)
            files[split], counts = mixed.each_alone(dataset, own, partial(_encode, tok=tok, options=options))
            names.append((split, f"{digest(key, counts) if counts else key}.arrow"))
            if counts:
                left_out["sources"]["rows"][split] = counts
            if examples_in(files[split]) == 0:
                discard(Path(files[split]))
                raise RunError(
                    f"task: no token is left to predict in the {split} split of {data.name}: texts of one token, or "
                    f"prompts that fill all {options.block_size} tokens of task.block_size"
                )
        facts: dict[str, Any] = {"source": data.name}
        facts["texts"] = {split: len(dataset) for split, dataset in splits.items()}
        if ends := {split: told for split in files if (told := _cut(splits[split], files[split], options))}:
            facts["cut_texts"] = ends
        if rows is not None:
            asked_for = key_aliases.former("task", options.model_dump(exclude={*cls.display_keys, "loss_chunk"}))
            key = digest("language modelling", VERSION, folder.name, asked_for, *written)
            index = rows.index(cls.example_maker(run, str(folder), {}), key)
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
            facts["texts"]["train"] = stream.about(index)["rows"]
            names.append(("train", stream.about(index)["content"]))
        return Prepared(digest(sorted(names)), files, str(folder), facts | left_out)

    @classmethod
    def stream(cls, run: Run) -> Stream:
        options = LanguageModelingOptions.model_validate(run.task.options)
        asked = options.columns or options.writing.columns
        whole = partial(_whole, options=options, drop=run.data.drop_missing)
        return Stream(run.data, asked, lambda rows, name: whole(rows, split="train", name=name), options.document)

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        options = LanguageModelingOptions.model_validate(run.task.options)
        tok = tokenizer.load(folder, run.model.trust_remote_code)

        def make(rows: Dataset) -> pa.RecordBatch:
            found = [each for each, _ in _documents(rows, tok, options, range(len(rows)))]
            return packing.examples(packing.joined(found, options.packed), options.block_size)

        return make

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.loss_chunk = self.options.loss_chunk

    metric_names = ("accuracy", "perplexity", "bits_per_byte", "byte_perplexity", "word_perplexity")

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import chunked_loss, model_configs, models

        model = models.build(self.run, "causal", self.tokenizer, empty, **model_configs.causal_entries(self.run))
        return chunked_loss.install(model, self.loss_chunk)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """Where texts of a block are read by themselves, positions begin anew with each, which is what transformers
        takes to mean that they do not see each other; it asks for no `attention_mask` beside."""
        batch = super().collate(columns, rows, index)
        if self.options.attend_across_documents:
            return batch
        import torch

        starts, _ = columns.ragged("starts").padded(rows if len(rows) else np.zeros(1, dtype=np.int64), 1)  # [B, T]
        place = np.arange(starts.shape[1])
        positions = place - np.maximum.accumulate(np.where(starts == 1, place, 0), axis=1)
        inputs = {name: values for name, values in batch.inputs.items() if name != "attention_mask"}
        return replace(batch, inputs=inputs | {"position_ids": torch.from_numpy(positions)})

    def score_texts(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        batch: MicroBatch,
        columns: Columns,
        rows: np.ndarray,
    ) -> Sums:
        import torch

        device = batch.targets.device
        measured = {name: int(columns.flat(name)[rows].sum()) for name in _SIZES}
        return {name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in measured.items()}

    def score_split(
        self, forward: Callable[[Mapping[str, Tensor]], Tensor], columns: Columns, rows: np.ndarray, device: Any
    ) -> Sums:
        """Of tokens that nothing comes before: `openings`, their loss after the token that begins or ends a text, and
        what they stand for. Not there where the tokenizer has neither, and not of a stream."""
        import torch

        begin = lm_documents.before(self.tokenizer)
        if begin is None or not isinstance(columns, Columns) or "openings" not in columns.names:
            return {}
        told = columns.ragged("openings")
        found = [told.row(int(row)) for row in rows[told.lengths[rows] > 0]]
        counts = {f"opening_{each}": float(columns.flat(f"opening_{each}")[rows].sum()) for each in _SIZES}
        sums = {name: torch.tensor(count, dtype=torch.float64) for name, count in counts.items()}
        if not found:
            return sums | {"openings": torch.zeros((), dtype=torch.float64)}
        inputs = {"input_ids": torch.tensor([[begin]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
        if not self.options.attend_across_documents:
            inputs = {"input_ids": inputs["input_ids"], "position_ids": torch.zeros(1, 1, dtype=torch.long)}
        logits = forward({name: values.to(device) for name, values in inputs.items()})[0, -1].double().cpu()
        return sums | {"openings": -logits.log_softmax(-1)[torch.from_numpy(np.concatenate(found)).long()].sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Per byte or word it is the loss of the whole text over their number, as in lm-evaluation-harness, which does
        not depend on how the tokenizer cuts it: also the loss of tokens that are no targets, as nothing is before
        them."""
        total, targets = float(sums["loss"]), float(sums["targets"])
        found = {
            "loss": total / targets,
            "perplexity": perplexity(total / targets),
            "accuracy": float(sums["right"]) / targets,
        }
        if "openings" not in sums:
            return found
        whole, size, count = (
            float(sums[one] + sums[other])
            for one, other in (("loss", "openings"), *((each, f"opening_{each}") for each in _SIZES))
        )
        if size > 0:
            found |= {"bits_per_byte": whole / math.log(2) / size, "byte_perplexity": perplexity(whole / size)}
        if count > 0:
            found["word_perplexity"] = perplexity(whole / count)
        return found

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        import torch

        columns = self.splits["validation"]
        options = self.options
        if not options.samples:
            return []
        if options.sample_prompt is not None:
            given = self.tokenizer(options.sample_prompt, verbose=False)["input_ids"]
            given = given[:-1] if given and given[-1] == lm_documents.end_of(self.tokenizer) else given
            starts = [given] * options.samples
        else:
            rows = np.linspace(0, len(columns) - 1, options.samples).astype(int)
            starts = [self._beginning(columns, int(row)) for row in rows]
        width = max(len(start) for start in starts)
        pad = int(self.tokenizer.pad_token_id)
        ids = torch.tensor([[*start, *[pad] * (width - len(start))] for start in starts])
        mask = torch.tensor([[1] * len(start) + [0] * (width - len(start)) for start in starts])
        room = max(1, options.block_size - width)  # a model may have no positions for more
        how = self._decoding(min(options.sample_tokens, room))
        tokens = generate({"input_ids": ids, "attention_mask": mask}, how).tolist()
        texts = [
            [self.tokenizer.decode(part, skip_special_tokens=True) for part in both]
            for both in zip(starts, tokens, strict=True)
        ]
        return [{"prompt": start, "written": text} for start, text in texts]

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """Of a conversation nothing: the sample has what the chat template has made of it."""
        return "" if self.options.messages is not None else super().sample_input(sample)

    @property
    def usage(self) -> str:
        most = max(1, min(self.options.sample_tokens, self.options.block_size // 2))
        return tokenizer.written_by(super().usage, self.options.messages is not None, most)

    def _beginning(self, columns: Columns, row: int) -> list[int]:
        """What comes before an example's first target, or its first quarter."""
        ids = columns.ragged("input_ids").row(row).tolist()
        first = int(np.argmax(columns.ragged("targets").row(row) >= 0)) + 1
        return ids[: first if first > 1 else max(1, min(len(ids), self.options.block_size) // 4)]

    @classmethod
    def decodes_greedily(cls, run: Run) -> bool:
        options = LanguageModelingOptions.model_validate(run.task.options)
        return options.temperature == 0 or options.samples == 0

    def _decoding(self, tokens: int) -> Decoding:
        from lockstep.tasks.models.decoding import Decoding

        end = lm_documents.end_of(self.tokenizer)
        pad = int(self.tokenizer.pad_token_id)
        return Decoding(tokens, pad, end, temperature=self.options.temperature, seed=self.run.seed)

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        options = LanguageModelingOptions.model_validate(run.task.options)
        return (options.prompt or options.text,)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """What is `written` after the text."""
        import torch

        from lockstep.tasks.models import batched_inference, models
        from lockstep.tasks.models.decoding import Decoding, by_transformers

        options = LanguageModelingOptions.model_validate(run.task.options)
        model, tok = models.exported("causal", folder, run)
        end = lm_documents.end_of(tok)

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            ((text,),) = rows  # each has room of its own to write, and draws of its own
            if options.messages is not None:
                text = options.writing.text(tok, [{"role": "user", "content": text}], None, True)
            ids = tok(text, verbose=False, add_special_tokens=options.messages is None)["input_ids"]
            ids = ids[:-1] if ids and ids[-1] == end else ids
            ids = ids[-(options.block_size - 1) :] or [tok.pad_token_id if end is None else end]
            room = min(options.sample_tokens, options.block_size - len(ids))
            how = Decoding(room, tok.pad_token_id, end, temperature=options.temperature, seed=run.seed)
            tokens = by_transformers(model, {"input_ids": torch.tensor([ids])}, how)[0].tolist()
            return [{"written": tok.decode(tokens, skip_special_tokens=True)}]

        return batched_inference.answers(rows, answer, at_once=1)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return str(answer["written"])

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run, self.options.chat_template)


# -- preparing -------------------------------------------------------------------------------------------------------


def _whole(dataset: Dataset, options: LanguageModelingOptions, split: str, name: str, drop: bool) -> Dataset:
    """The rows with something to read. Errors: `RunError`."""
    if options.messages is None:
        return missing_values.texts(dataset, options.columns, split, name, drop)
    missing_values.present(dataset, options.writing.columns, split, name)
    return conversations.whole(dataset, options.messages, split, name, drop)


def _batches(train: Dataset, options: LanguageModelingOptions) -> Iterator[list[str]]:
    """The texts that a tokenizer is trained on."""
    for start in range(0, len(train), 1000):
        rows = train[start : start + 1000]
        if options.messages is not None:
            yield [message.get("content") or "" for messages in rows[options.messages] for message in messages]
        else:
            texts = (text for column in options.columns.values() for text in rows[column])
            yield [piece for text in texts for piece in chunked_tokenization.pieces(text)]


def _documents(dataset: Dataset, tok: Any, options: LanguageModelingOptions, rows: range) -> lm_documents.Found:
    """Some rows, as they are to be cut into examples."""
    if options.messages is not None:
        found = conversations.documents_of(dataset, tok, options.writing, rows)
    elif options.prompt is not None and options.response is not None:
        found = lm_documents.of_prompts(dataset, tok, options.prompt, options.response, rows)
    else:
        found = lm_documents.of_texts(dataset, tok, options.text, rows)
    if options.packed:
        return found if options.attend_across_documents else ((packing.apart(each), count) for each, count in found)
    if not options.cut:
        return found
    most = options.block_size + 1  # a response is not read without its prompt
    return ((each.beginnings(most), count) for each, count in found)


def _encode(dataset: Dataset, key: str, tok: Any, options: LanguageModelingOptions) -> str:
    def tokens(rows: range) -> lm_documents.Found:
        return _documents(dataset, tok, options, rows)

    read = list((options.columns or options.writing.columns).values())
    parts = arrow_cache.cuts(dataset.select_columns(list(dict.fromkeys(read))))
    separate = not options.attend_across_documents
    return packing.write(parts, tokens, options.block_size, options.packed, key, separate, options.cut, True)


def _cut(dataset: Dataset, file: str, options: LanguageModelingOptions) -> dict[str, Any]:
    """What the block's size left out of a split's texts, for those who read about the run; nothing where all is
    there."""
    if not options.cut:
        return {}
    columns = Columns(file)
    left = columns.flat("left")[np.arange(len(columns))]
    of = conversations.documents_in(dataset, options.writing) if options.messages is not None else len(dataset)
    told = {"texts": int((left > 0).sum()), "tokens": int(left.sum()), "nothing": of - len(columns), "of": of}
    return told | {"most": options.block_size, "key": "task.block_size"} if told["texts"] or told["nothing"] else {}


def _check_model(run: Run, options: LanguageModelingOptions) -> None:
    from lockstep.tasks.models import model_configs, models, padding

    models.check(run, "causal", options.block_size, "task.block_size", **model_configs.causal_entries(run))
    padding.check_foresight(run)
    if not options.attend_across_documents and (why := padding.crosses(run)) is not None:
        raise RunError(f"task.attend_across_documents: false is not for this family of models: {why}; leave it out")
