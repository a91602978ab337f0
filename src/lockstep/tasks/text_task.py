"""Base of text tasks: the steps from rows to cached tokens, and a model that reads them.

In: a run, and the task's description of its rows: columns to read, usable rows, encoding. Out: `prepare`, eager or
streamed, for one source or several; micro-batches, the model and its export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.data import tokenizer
from lockstep.data.arrow_cache import VERSION, Columns, Make, Prepared, content, digest, encode
from lockstep.data.batch import IGNORED, TARGETS, MicroBatch
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor, nn

    from lockstep.data import (
        fixed_lengths,
        lm_documents,
        raw_rows,
        source,
        splitting,
        stream,
        token_checks,
        usable_rows,
    )
    from lockstep.data.column_types import Kind
    from lockstep.data.stream import Stream
    from lockstep.tasks.models import model_configs, models, padding, token_rows
    from lockstep.tasks.models.model_configs import ModelChoice
else:  # for model.compile_lengths, and to prepare data that are not in the cache; models import torch
    (fixed_lengths,) = lazy("lockstep.data", "fixed_lengths")
    lm_documents, raw_rows, source = lazy("lockstep.data", "lm_documents", "raw_rows", "source")
    (splitting,) = lazy("lockstep.data", "splitting")
    stream, token_checks, usable_rows = lazy("lockstep.data", "stream", "token_checks", "usable_rows")
    model_configs, models = lazy("lockstep.tasks.models", "model_configs", "models")
    padding, token_rows = lazy("lockstep.tasks.models", "padding", "token_rows")

_UNIGRAM = (
    "tokenizer.train: training unigram is not deterministic (ties are broken at random), so tokens and weights "
    "differ with another cache or on another machine. To reuse this tokenizer, set tokenizer.source to the export "
    "of this run"
)

Encoder = Callable[[dict[str, list]], dict[str, Any]]  # columns of some rows -> columns of their examples
Arrays = tuple[Mapping[str, Any], Any]  # inputs of the model by name, and targets: arrays or tensors


@dataclass(frozen=True)
class TextData:
    """The data of a run between reading and encoding."""

    name: str  # of the data set
    splits: dict[str, Dataset]  # usable rows; without train if train is streamed
    rows: Stream | None = None  # train, if streamed
    labels: Any = None  # from `read_labels`


class TextTask(Task):
    """Base class of tasks whose examples are tokens of texts. The methods of the first part are the steps of
    `prepare`; a task overrides those in which it differs."""

    plugin = "tasks"  # a base: it has no name in a run file

    unit: ClassVar[str | None] = "tokens"
    cache_name: ClassVar[tuple[Any, ...]] = ()  # prefix of the cache keys of its tokens
    generative: ClassVar[bool] = False  # whether a trained tokenizer ends every text with its end token
    within: ClassVar[str | None] = None  # struct column in which missing columns may be nested
    loss_chunk: int | None = None  # tokens per chunk of logits; None: all at once
    tokenizer: Any
    length_key: ClassVar[str] = "data.max_length"
    reads_token_types: bool = False  # whether a single text has token types, in the library that defines the task
    token_types: tokenizer.TokenTypes | None = None  # of single texts, if the model is given them

    # -- the steps of `prepare` ----------------------------------------------------------------------------------------

    @classmethod
    def columns_to_read(cls, options: Any) -> dict[str, str]:
        """All columns to read: key of the run file -> column name."""
        return dict(options.text_columns)

    @classmethod
    def read_as(cls, options: Any) -> dict[str, Kind]:
        """Kind of each column of tables and lines, where all values are text: column -> verbatim text or label, or a
        number."""
        return dict.fromkeys(options.text_columns.values(), "text")

    @classmethod
    def target_columns(cls, options: Any) -> list[str]:
        """Columns that the model learns to write."""
        return []

    @classmethod
    def document(cls, options: Any) -> str | None:
        """Unit of text in a .txt file: the `file` or each `line`; None: its lines are texts with labels."""
        return None

    @classmethod
    def valid_rows(cls, rows: Dataset, options: Any, split: str, name: str, drop: bool) -> Dataset:
        """Rows that can become examples: by default those with a text in each column. Other rows are dropped if `drop`
        is set, else refused. Errors: `RunError`."""
        return usable_rows.texts(rows, options.text_columns, split, name, drop)

    @classmethod
    def learnable(cls, rows: Dataset, options: Any, split: str, name: str, drop: bool) -> Dataset:
        """Usable rows with something to learn. Other rows are dropped if `drop` is set, else refused. Errors:
        `RunError`."""
        return rows

    def with_known_labels(self, data: TextData) -> dict[str, Dataset]:
        """The splits without rows whose labels do not occur in train."""
        return data.splits

    def usable_splits(self, read: source.Source, options: Any) -> dict[str, Dataset]:
        """Return the `valid_rows` of every split. Errors: `RunError`."""
        drop = self.run.data.drop_missing
        return {split: self.valid_rows(rows, options, split, read.name, drop) for split, rows in read.splits.items()}

    @classmethod
    def dedup_columns(cls, options: Any) -> tuple[list[str], list[str]]:
        """Columns that identify duplicates across splits: (text columns, label columns) of usable rows."""
        return list(options.text_columns.values()), []

    def read_labels(self, data: TextData) -> Any:
        """Read the labels of the splits; None if the task has none. Errors: `RunError`."""
        return None

    def holdout_fn(self, data: TextData) -> splitting.Cut:
        """The function that holds out a share of train."""
        return lm_documents.cut

    def check_labels(self, data: TextData) -> None:
        """Check the labels of the final splits. Errors: `RunError`."""

    @classmethod
    def tokenizer_texts(cls, rows: Dataset, options: Any) -> Iterator[list[str]]:
        """Yield batches of the texts that a tokenizer is trained on."""
        texts, _ = cls.dedup_columns(options)
        for batch in in_batches(rows):
            yield [text for column in texts for text in batch[column]]

    def prepare_tokenizer(self, data: TextData, hashed: str) -> Path:
        """Return the tokenizer's folder, training the tokenizer if needed. `hashed`: hash of the train rows. Errors:
        `RunError`."""

        def texts(rows: Dataset) -> Iterator[list[str]]:
            return self.tokenizer_texts(rows, self.options)

        choice = tokenizer.TokenizerChoice.of(self.run)
        if data.rows is not None:
            return data.rows.tokenizer(choice, texts, self.generative)
        return tokenizer.prepare(choice, texts(data.splits["train"]), hashed, self.generative)

    def fit_defaults(self) -> tuple[Run, list[str]]:
        return (self.run, []) if self.head is None else models.with_length_that_fits(self.run, self.length_key)

    def check_prepared(self, prepared: Prepared) -> None:
        if self.head is not None:
            run = self.run
            models.check_arithmetic(run.model, self.head, run.precision, run.strategy.exact)

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        """Refuse a model or tokenizer that does not fit the task. Errors: `RunError`."""
        models.check(self.model_choice, str(self.head), **self.checked_entries())
        models.check_tokenizer(self.run.model, str(self.head), tok)

    def tokenizers(self, folder: Path, tok: Any) -> dict[str, Any]:
        """Map each token column to the tokenizer that encodes it. `tok`: the tokenizer of `folder`."""
        return {"input_ids": tok}

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, token_checks.Limit]:
        """Truncation limits: token column -> maximum number of tokens kept per text. `read_by`: the result of
        `tokenizers`."""
        special = read_by["input_ids"].num_special_tokens_to_add(pair=False)
        return {"input_ids": token_checks.Limit("data.max_length", self.run.data.max_length, special)}

    def check_vocabulary(self, read_by: Mapping[str, Any]) -> list[str]:
        """Compare the tokenizers with the model and return notes on their sizes. Refuses limits that leave no text
        tokens, and required tokens without an embedding row. Errors: `RunError`."""
        token_checks.check_limits(list(self.limits(read_by).values()))
        if self.head is None:
            return []
        model, read = self.run.model, read_by["input_ids"]
        notes = token_rows.check(model, self.head, read_by)
        if self._leaves_out_types(read):
            family = model_configs.load_config(model).model_type
            notes.append(
                f"the tokenizer writes token_type_ids, and {self.run.task.name} trains a {family} without them; the "
                "exported tokenizer writes none, so that it gives the model what it was trained on"
            )
        return notes + token_rows.other_tokens(model, self.run.tokenizer, read)

    def encodes_token_types(self, tok: Any) -> bool:
        """Whether the encoded examples have the token types that the tokenizer writes, as pairs of texts do."""
        return False

    def gives_token_types(self, tok: Any) -> bool:
        """Whether the model is given the token types of single texts, as transformers' `Trainer` does. Only models that
        tell them from none are; others compute the same without."""
        return self.reads_token_types and models.gives_types(self.run.model, str(self.head), tok)

    def _leaves_out_types(self, tok: Any) -> bool:
        reads = self.encodes_token_types(tok) or self.gives_token_types(tok)
        return not reads and models.distinguishes_types(self.run.model, tok)

    def check_tokens(self, data: TextData, read_by: Mapping[str, Any], split: str, columns: Columns) -> list[str]:
        """Check the tokens of an encoded split and return notes. Refuses examples that the model cannot read and tokens
        that carry no information; notes those that carry little. Errors: `RunError`."""
        run, fits = self.run, None if self.head is None else models.most_tokens(self.run.model)
        limits = self.limits(read_by)
        limits = {name: replace(limit, positions=fits) for name, limit in limits.items()}
        self.check_lengths(split, columns)
        if self.head is not None:
            token_rows.check_split(run.model, self.head, read_by, split, columns)
        if split != ("train" if "train" in data.splits else next(iter(data.splits))):
            return []
        notes = self.answer_notes(data, data.splits[split], read_by["input_ids"])
        for side, tok in read_by.items():
            texts = self.side_columns(self.options, side)
            notes += token_checks.check(data.splits[split], texts, split, columns, side, tok, limits.get(side))
        return notes

    def answer_notes(self, data: TextData, rows: Dataset, tok: Any) -> list[str]:
        """Notes on the answers that the model learns to write. Errors: `RunError`."""
        return []

    @classmethod
    def side_columns(cls, options: Any, side: str) -> list[str]:
        """Columns of usable rows whose texts a token column encodes."""
        return cls.dedup_columns(options)[0]

    def bounded(self, read_by: Mapping[str, Any], make: Make) -> tuple[Make, list[int]]:
        """Add token checks to `make` for streamed rows; return it and the values that the checks depend on."""
        return (make, []) if self.head is None else token_rows.bounded(self.run.model, self.head, read_by, make)

    def check_lengths(self, split: str, columns: Columns) -> None:
        """Refuse examples too short for the model, alone or in a batch of short ones: CANINE joins `downsampling_rate`
        tokens into one. Errors: `RunError`."""
        config = model_configs.load_config(self.run.model) if self.head is not None else None
        if config is None or config.model_type != "canine":
            return
        least = config.downsampling_rate
        short = sum(int((np.asarray(side) < least).sum()) for side in columns.sides)
        if short:
            raise RunError(
                "LS3350",
                f"data: {short} texts of {split} have fewer than {least} tokens. A canine joins {least} tokens "
                "into one (model.config.downsampling_rate), so it cannot process a batch of such texts; "
                f"exclude them with data.filter: {{COLUMN: {{min_tokens: {least}}}}} (min_characters if the run "
                "trains its tokenizer)",
            )

    def checked_entries(self) -> dict[str, Any]:
        """Model config entries that the task sets regardless of its data."""
        return {}

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        """Parts of a split's cache key besides rows and tokenizer. `rows` is None for a stream."""
        return [self.run.data.max_length]

    def encoder(self, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        """Return the function that encodes rows with the tokenizer in `folder`, and the features of its output."""
        raise NotImplementedError

    @classmethod
    def encoded_rows(cls, rows: Dataset, options: Any) -> Dataset:
        """Select the columns that `encoder` reads."""
        texts, labels = cls.dedup_columns(options)
        return rows.select_columns(list(dict.fromkeys([*texts, *labels])))

    def encode_split(self, data: TextData, split: str, folder: Path, tok: Any, key: str) -> tuple[str, list[int]]:
        """Encode a split into shards, cached under `key`. Returns their folder, and the number of examples of each
        source if it differs from the number of rows. Errors: `RunError`."""
        encoder, features = self.encoder(str(folder), data.labels, split, data.name)
        return encode(self.encoded_rows(data.splits[split], self.options), encoder, features, key), []

    @classmethod
    def content_name(cls, file: str, key: str, counts: list[int]) -> str:
        """The content identifier of a split in the key of the prepared data."""
        return Path(file).name

    def label_names(self, data: TextData) -> list[str] | None:
        """Names of the labels, which are part of the key of the prepared data; None if there are none."""
        return None

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        """Facts about the data, for training and for reports."""
        return {}

    # -- before any process --------------------------------------------------------------------------------------------

    def read_source(self) -> source.Source:
        """Read the rows of all splits. Errors: `RunError`."""
        options, data = self.options, self.run.data
        document = self.document(options)
        source.check_document(data, document)
        counts = usable_rows.TokenCounts.of(tokenizer.TokenizerChoice.of(self.run), self.target_columns(options))
        return source.load(data, self.run.seed, document, self.columns_to_read(options), counts, self.read_as(options))

    def prepare(self) -> Prepared:
        options = self.options
        texts, labels = self.dedup_columns(options)
        read = self.read_source()
        usable, drop = self.usable_splits(read, options), self.run.data.drop_unusable
        splits = {split: self.learnable(part, options, split, read.name, drop) for split, part in usable.items()}
        rows = self.stream().with_files(splits, texts) if self.run.data.stream else None
        data = TextData(read.name, splits, rows)
        data = replace(data, labels=self.read_labels(data))
        if drop:
            data = replace(data, splits=self.with_known_labels(data))
        learned = data.splits
        splits, left_out = splitting.deduplicate_and_split(
            read, learned, self.run.data, self.run.seed, texts, labels, self.holdout_fn(data)
        )
        length = int(self.run.task.options.get("block_size") or self.run.data.max_length)
        left_out |= raw_rows.fact(splits, [*texts, *labels, *read.columns], length, self.run.seed)
        left_out = usable_rows.with_unusable(left_out, usable, learned, read.name)
        data = replace(data, splits=splits)
        self.check_labels(data)
        hashes = {split: content(part, [*texts, *labels]) for split, part in splits.items()}
        folder = self.prepare_tokenizer(data, hashes.get("train", ""))
        tok: Any = tokenizer.load(str(folder), self.run.model.trust_remote_code)
        self.check(data, folder, tok)
        read_by = self.tokenizers(folder, tok)
        notes = self.check_vocabulary(read_by)
        files: dict[str, str] = {}
        names: list[tuple[str, str]] = []
        for split, part in splits.items():
            key = digest(*self.cache_name, VERSION, hashes[split], folder.name, *self.key_parts(data, tok, part))
            files[split], of_sources = self.encode_split(data, split, folder, tok, key)
            notes += self.check_tokens(data, read_by, split, Columns(files[split]))
            names.append((split, self.content_name(files[split], key, of_sources)))
            if of_sources:
                left_out["sources"]["rows"][split] = of_sources
        if rows is not None:
            notes += token_checks.of_stream((part for *_, part in rows.walk()), texts, "train")
        facts = {"source": read.name} | self.facts(data, files)
        notes = [*read.notes, *facts.get("notes", []), *notes]
        facts |= {"notes": notes} if notes else {}
        if rows is not None:
            make, bounds = self.bounded(read_by, self.example_maker(str(folder), facts))
            key = digest(*self.cache_name, VERSION, folder.name, *self.key_parts(data, tok, None), *bounds)
            index = rows.index(make, key)
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
            if drop and (count := left_out.get("left_out", {}).pop("train", 0)):  # a chunk counts both together
                left_out["lacking_or_unusable"] = {"train": count}
            names.append(("train", stream.read_index(index)["content"]))
            if "texts" in facts:  # rows per split, if rows are not examples
                facts["texts"]["train"] = stream.read_index(index)["rows"]
        called = self.label_names(data)
        return Prepared(digest(sorted(names), *[called] * (called is not None)), files, str(folder), facts | left_out)

    def stream(self) -> Stream:
        """The selection of usable rows for a streamed training split, without its files."""
        options = self.options

        def whole(rows: Dataset, name: str) -> Dataset:
            usable = self.valid_rows(rows, options, "train", name, self.run.data.drop_missing)
            return self.learnable(usable, options, "train", name, self.run.data.drop_unusable)

        return stream.Stream(self.run.data, self.columns_to_read(options), whole, self.document(options), self.within)

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        """Return the function that turns rows into examples, given a tokenizer folder and the facts of `Prepared`."""
        options = self.options
        make = stream.maker(*self.encoder(folder, facts.get("labels"), "train", "the stream"))
        return lambda rows: make(self.encoded_rows(rows, options))

    # -- in every process ----------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.tokenizer = tokenizer.load(self.prepared.tokenizer, self.run.model.trust_remote_code)
        if not self.encodes_token_types(self.tokenizer) and self.gives_token_types(self.tokenizer):
            self.token_types = tokenizer.TokenTypes.of(self.tokenizer)

    @property
    def usage(self) -> str:
        return f'{super().usage}\nask("some text")'

    @property
    def model_choice(self) -> ModelChoice:
        return model_configs.ModelChoice.of(self.run)

    @property
    def padded_because(self) -> str | None:
        if self.head is None:
            return super().padded_because
        return padding.unsupported_reason(self.model_choice, self.head)

    @property
    def warnings(self) -> list[str]:
        """Warnings about the data, and about a tokenizer whose training is not reproducible."""
        return [*super().warnings, *[_UNIGRAM] * (self.run.tokenizer.train == "unigram")]

    @property
    def config_entries(self) -> dict[str, Any]:
        """Model config entries that the task sets."""
        return self.checked_entries()

    def model(self, empty: bool = False) -> nn.Module:
        return models.build(self.model_choice, str(self.head), self.tokenizer, empty, **self.config_entries)

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """Padded model inputs and targets of at least one example; `collate` wraps them in a micro-batch."""
        raise NotImplementedError

    def padded_texts(self, columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return `input_ids`, `attention_mask` and, if the model is given them, `token_type_ids`: int64 [B, T]."""
        ids, mask = columns.ragged("input_ids").padded(rows, int(self.tokenizer.pad_token_id))
        return self.with_types({"input_ids": ids, "attention_mask": mask})

    def with_types(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the token types of single texts, if the model is given them."""
        types = self.token_types
        return inputs if types is None else inputs | {"token_type_ids": types.padded(inputs["attention_mask"])}

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        return self.collated(columns, rows, index, self.tensors)

    def collated(
        self, columns: Columns, rows: np.ndarray, index: int, tensors: Callable[[Columns, np.ndarray], Arrays]
    ) -> MicroBatch:
        """Build the micro-batch that `tensors` returns for rows. If there are no rows, use the first row and ignore its
        targets."""
        import torch

        inputs, labels = tensors(columns, rows if len(rows) else np.zeros(1, dtype=np.int64))
        inputs = fixed_lengths.padded_left(inputs) if self.pads_left else inputs
        targets = torch.as_tensor(labels)
        targets = targets if len(rows) else torch.full_like(targets, IGNORED)
        inputs = {name: torch.as_tensor(values) for name, values in inputs.items()}
        own_loss = {} if self.loss_chunk is None else {TARGETS: targets}
        return MicroBatch(index, inputs | own_loss, targets)

    @cached_property
    def pads_left(self) -> bool:
        """Whether padding stands on the left, because the model's output is that of the last place."""
        return self.head is not None and models.pads_left(model_configs.load_config(self.run.model), self.head)

    def widened(self, micro: MicroBatch, lengths: Sequence[int]) -> MicroBatch:
        if self.pads_left:
            return micro
        return fixed_lengths.widened(micro, lengths, int(self.tokenizer.pad_token_id), bool(self.targets_by_token))

    def decoded(self, ids: Tensor) -> list[str]:
        """Decode tokens [B, T] to texts, special tokens skipped."""
        return [text.strip() for text in self.tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True)]

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        model: Any = models.to_fill(self.run.model, self.model)
        self.set_export_entries(model.config)
        models.stop_at(model, self.end_tokens)
        without = self._leaves_out_types(self.tokenizer)
        tok = tokenizer.without_types(self.tokenizer) if without else self.tokenizer
        models.save(model, weights, tok, folder, self.run.model, self.chat_template)

    def set_export_entries(self, config: Any) -> None:
        """Set entries of the exported model's config that training has decided."""

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a generated continuation; empty if the task generates none."""
        return []

    @property
    def chat_template(self) -> str | None:
        """The chat template used in training, in place of the tokenizer's; None: the tokenizer's."""
        return None


def check_template(tok: Any, template: str | None, key: str) -> None:
    """Refuse a tokenizer that cannot render conversations for the task's `key`: it needs a chat template and character
    offsets. Errors: `RunError`."""
    if not (template or tok.chat_template):
        raise RunError("LS3351", f"task.{key}: the tokenizer has no chat template; set task.chat_template")
    if template and "{{" not in template and "{%" not in template:  # every conversation would be this text
        raise RunError(
            "LS3412",
            f"task.chat_template: {template[:80]!r} is not a Jinja template, because it has no {{{{ }}}} or "
            "{% %}; give the template itself, not the name of its file",
        )
    if not tok.is_fast:
        raise RunError(
            "LS3352",
            f"task.{key}: the tokenizer does not report the characters of its tokens (no fast tokenizer); "
            "choose a model with a fast tokenizer",
        )


def in_batches(rows: Dataset) -> Iterator[dict[str, list]]:
    """Yield rows as columns, 1,000 rows at a time."""
    for start in range(0, len(rows), 1000):
        yield rows[start : start + 1000]
