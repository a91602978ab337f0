"""Text classification and regression with any model that `AutoModelForSequenceClassification` knows.

In: a column of texts (or two), and one label, several labels or numbers to learn (objectives/). Out: losses from sums;
scores from sums and from predictions gathered in the order of the split. `LabelTask` is the part of it that holds for
any kind of example: an objective learns from logits, float32 [B, C].
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data import tokenizer
from lockstep.data.arrow_cache import Columns, Make, Prepared
from lockstep.data.batch import MicroBatch, Sums
from lockstep.tasks.models import heads
from lockstep.tasks.objectives.objective import ClassificationOptions, LabelCodes, Objective
from lockstep.tasks.objectives.one_label import MOST_CLASSES, OneLabel
from lockstep.tasks.objectives.regression import RegressionObjective
from lockstep.tasks.objectives.several_labels import SeveralLabels
from lockstep.tasks.task import Calibrates, Forward, Generate, GivesPredictions, Predicts, Streams
from lockstep.tasks.text_task import Arrays, Encoder, TextData, TextTask

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor

    from lockstep.data import builtin, labels, row_files, source, splitting, stream, token_checks, usable_rows
    from lockstep.data.column_types import Kind
    from lockstep.data.stream import Stream
    from lockstep.tasks.models import head_labels, inference, model_configs, models
else:  # to prepare data that are not in the cache; models import torch
    builtin, labels, row_files, source = lazy("lockstep.data", "builtin", "labels", "row_files", "source")
    splitting, stream, token_checks = lazy("lockstep.data", "splitting", "stream", "token_checks")
    (usable_rows,) = lazy("lockstep.data", "usable_rows")
    head_labels, inference, models = lazy("lockstep.tasks.models", "head_labels", "inference", "models")
    (model_configs,) = lazy("lockstep.tasks.models", "model_configs")

THRESHOLD = "decision_threshold"  # its name in an export's config


class LabelTask(Predicts, GivesPredictions, Calibrates):
    """A task whose targets are read and learned by an objective."""

    plugin = "tasks"  # a base: it has no name in a run file

    objective: Objective
    threshold: float | None = None  # chosen on the validation split

    def set_objective(self, objective: Objective) -> None:
        """Set the objective, and gather the per-example outputs that its scores need."""
        self.objective = objective
        if len(objective.names) <= MOST_CLASSES or self.run.metrics or not isinstance(objective, OneLabel):
            self.per_example_outputs = ("predictions", "labels")

    def count_targets(self, columns: Columns, rows: np.ndarray) -> float:
        return self.objective.count(columns, rows)

    def targets_in_batch(self, targets: Tensor) -> float:
        return self.objective.targets_in_batch(targets)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.objective.loss_sum(outputs.logits.float(), targets)

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        import torch

        logits = outputs.logits.float()
        loss = self.objective.loss_sum(logits, targets)
        with torch.no_grad():  # logits are small here, and this works for any objective
            rows = zip(logits.split(1), targets.split(1), strict=True)
            return loss, torch.stack([self.objective.loss_sum(row, target) for row, target in rows])

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        sums = self.objective.score(forward(batch.inputs).float(), batch.targets)
        gathers = bool(self.per_example_outputs)
        return {name: value for name, value in sums.items() if gathers or name not in ("predictions", "labels")}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return self.objective.metrics(sums, self.threshold)

    def tables(self, sums: Sums) -> dict[str, Any]:
        return self.objective.tables(sums, self.threshold)

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.objective.metric_names

    def score_names(self) -> tuple[str, ...] | None:
        every = [*OneLabel.metric_names, *SeveralLabels.metric_names, *RegressionObjective.metric_names]
        return tuple(dict.fromkeys(every)) if self.built_in() else None

    def possible_scores(self) -> tuple[str, ...] | None:
        return self.objective.score_names if self.built_in() else None

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.objective.metric_inputs(sums)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return self.objective.dummy_predictions()

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        answers = self.objective.answers(forward(batch.inputs).float(), self.threshold)
        columns_shown = self.inputs_shown(rows, batch) | {
            "predicted": [self.objective.short_answer(answer) for answer in answers],
            "label": [self.objective.format_target(target) for target in batch.targets],
        }
        return [dict(zip(columns_shown, values, strict=True)) for values in zip(*columns_shown.values(), strict=True)]

    @abstractmethod
    def inputs_shown(self, rows: np.ndarray, batch: MicroBatch) -> dict[str, list[str]]:
        """Input columns of the samples at `rows` of the validation split."""

    # -- the threshold -----------------------------------------------------------------------------------------------

    def calibrate(self, scores: Mapping[str, float]) -> None:
        if self.objective.chooses_threshold and np.isfinite(chosen := scores.get("threshold", np.nan)):
            self.threshold = float(chosen)

    @property
    def needs_calibration(self) -> bool:
        return self.objective.chooses_threshold and self.threshold is None

    @classmethod
    def calibration_in(cls, folder: Path) -> dict[str, float]:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {"threshold": config[THRESHOLD]} if config.get(THRESHOLD) is not None else {}

    def keep_threshold(self, config: Any) -> None:
        """Store the current threshold in the config of an exported model."""
        vars(config).pop(THRESHOLD, None)  # the threshold of the base model
        threshold = self.threshold if self.objective.chooses_threshold else self.objective.fixed_threshold
        if threshold is not None:
            setattr(config, THRESHOLD, threshold)

    @classmethod
    def threshold_of(cls, objective: Objective, folder: Path) -> float | None:
        """The threshold of an export."""
        threshold = cls.calibration_in(folder).get("threshold")
        return threshold if objective.chooses_threshold else objective.fixed_threshold


def objective_of(options: ClassificationOptions) -> type[Objective]:
    """The objective class for these options."""
    if options.regression:
        return RegressionObjective
    return SeveralLabels if options.multi_label else OneLabel


class Classification(TextTask, Streams, LabelTask):
    """Classification or regression of texts."""

    Options = ClassificationOptions
    head = heads.CLASSIFICATION
    targets_by_token = False
    column_keys = ("text", "label")
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "text": (
            *("text", "sentence", "content", "review", "document", "body", "tweet", "comment", "message", "question"),
            *("premise", "title", "story", "article", "post", "utterance", "abstract", "description"),
        ),
        "label": (
            *("label", "labels", "category", "categories", "class", "classes", "sentiment", "emotion", "emotions"),
            *("intent", "topic", "topics", "stars", "rating", "target", "targets", "tags", "genre", "genres", "y"),
            *("spam", "toxic"),
        ),
    }
    usual_rate = 3e-5
    default_model = "distilbert/distilbert-base-uncased"
    pipeline = "text-classification"
    display_keys = ("samples",)
    row_is_example = True
    reads_token_types = True
    drops_unlabeled_test = True

    @property
    def usage(self) -> str:
        example_input = (
            '"some text"' if self.options.text_pair is None else '{"text": "some text", "text_pair": "another text"}'
        )
        return super().usage.replace('"some text"', example_input)

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def columns_to_read(cls, options: ClassificationOptions) -> dict[str, str]:
        return options.text_columns | options.labels

    @classmethod
    def read_as(cls, options: ClassificationOptions) -> dict[str, Kind]:
        labels_as: dict[type[Objective], Kind] = {OneLabel: "label", RegressionObjective: "number"}
        kind = labels_as.get(objective_of(options))
        return super().read_as(options) | ({} if kind is None else dict.fromkeys(options.labels.values(), kind))

    @classmethod
    def dedup_columns(cls, options: ClassificationOptions) -> tuple[list[str], list[str]]:
        return list(options.text_columns.values()), list(options.labels.values())

    def usable_splits(self, read: source.Source, options: ClassificationOptions) -> dict[str, Dataset]:
        """Usable rows of each split; drops a test split whose labels are hidden, as benchmarks publish them."""
        splits = dict(read.splits)
        learned, train = options.labels.values(), splits.get("train")
        test_named = self.run.data.test is not None or "test" not in splits
        if not test_named and all(labels.hidden(splits["test"], column, train) for column in learned):
            del splits["test"]
        return {
            s: self.valid_rows(rows, options, s, read.name, self.run.data.drop_missing) for s, rows in splits.items()
        }

    @classmethod
    def valid_rows(cls, rows: Dataset, options: ClassificationOptions, split: str, name: str, drop: bool) -> Dataset:
        usable_rows.check_columns(rows, cls.columns_to_read(options), split, name)
        lacks = {
            key: (column, usable_rows.lacking(rows, column)) for key, column in cls.columns_to_read(options).items()
        }
        if options.multi_label and len(options.labels) == 1:
            ((key, column),) = options.labels.items()
            lacks[key] = (column, labels.incomplete(rows, column))
        rows = usable_rows.without(rows, lacks, split, name, drop)
        return objective_of(options).readable(usable_rows.texts(rows, options.text_columns, split, name, drop), options)

    def read_labels(self, data: TextData) -> LabelVocab:
        options = self.options
        others = {} if self.run.data.drop_unusable else data.splits  # splits whose labels must occur in train
        if data.rows is not None:
            return _of(data.rows, self.run.model, self.run.data.types, options, others)
        splits = {split: rows for split, rows in data.splits.items() if split in ("train", *others)}
        return LabelVocab(
            *_as_the_model(self.run.model, options, objective_of(options).codes(splits, options, data.name))
        )

    @classmethod
    def has_unusable_rows(cls, options: ClassificationOptions) -> bool:
        return not options.regression

    def with_known_labels(self, data: TextData) -> dict[str, Dataset]:
        columns, kind = list(self.options.labels.values()), objective_of(self.options)
        if kind is RegressionObjective or len(columns) > 1:
            return data.splits
        place = set(data.labels.codes.place)
        known = place.__contains__ if kind is OneLabel else place.issuperset
        return {split: labels.known_rows(rows, columns, known) for split, rows in data.splits.items()}

    def holdout_fn(self, data: TextData) -> splitting.Cut:
        return partial(objective_of(self.options).cut, data.labels.codes)

    def check_labels(self, data: TextData) -> None:
        """Refuse weights and thresholds for labels that do not occur."""
        counts = data.labels.counts_in(data)
        examples = len(data.splits["train"]) if data.rows is None else sum(counts)
        objective_of(self.options)(self.options, data.labels.codes.names, counts, examples)

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        super().check(data, folder, tok)
        models.check_encoded(self.run.model, self.head, tok, len(self.options.text_columns))

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, token_checks.Limit]:
        texts = len(self.options.text_columns)
        special = read_by["input_ids"].num_special_tokens_to_add(pair=texts == 2)
        return {"input_ids": token_checks.Limit("data.max_length", self.run.data.max_length, special, texts)}

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        options, kind, codes = self.options, objective_of(self.options), data.labels.codes
        keys = options.model_dump(include={"text", "text_pair", "label", "label_names"})
        keys |= {} if kind is OneLabel else {"learned": kind.problem}
        return [self.run.data.max_length, keys, codes.names, *[codes.values] * (rows is None)]

    def label_names(self, data: TextData) -> list[str]:
        return data.labels.codes.names

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        codes, counts = data.labels.codes, data.labels.counts_in(data)
        facts: dict[str, Any] = {"label_values": codes.values}
        if self.options.regression:
            facts["numbers"] = codes.names
        else:
            facts |= {"labels": codes.names, "of_label": counts}
            facts |= labels.alike(dict(zip(codes.names, counts, strict=False)))
        facts |= {"notes": data.labels.notes} if data.labels.notes else {}
        if (
            data.name == source.BUILTIN
            and list(self.options.labels.values()) == ["label"]
            and objective_of(self.options) is OneLabel
        ):
            facts["best_possible"] = {
                split: {"accuracy": builtin.best_accuracy(rows[:])}
                for split, rows in data.splits.items()
                if getattr(self.run.data, split) is None
            }
        return facts

    def plain_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        facts, column = self.prepared.facts, self.options.label
        label_values = facts.get("label_values", facts.get("labels")) or [""]
        if not isinstance(label_values[0], int):
            return rows
        # a line-based stream has its numbers as strings
        texts = [column] if isinstance(column, str) and isinstance(rows[0].get(column), str) else []
        return [row | {name: int(row[name]) for name in texts} for row in rows]

    def unsupported_keys(self) -> dict[str, str]:
        options = self.options
        if self.run.data.stream and objective_of(options) is not OneLabel:
            return {"data.stream": "it supports one label per text, not multi_label or regression; remove it"}
        return {}

    def encoder(self, folder: str, labels: LabelVocab, split: str, name: str) -> tuple[Encoder, Features]:
        """Return the function that encodes rows to tokens and labels, and the features of its output."""
        import datasets

        options = self.options
        texts = list(options.text_columns.values())
        tok: Any = tokenizer.load(folder, self.run.model.trust_remote_code)
        empty = _instead_of_none(tok)
        numbers = datasets.List(datasets.Value("int32"))
        features = datasets.Features({"input_ids": numbers, "label": objective_of(options).feature()})
        listed = "token_type_ids" in tok.model_input_names
        pair = self.encodes_token_types(tok) and listed and "token_type_ids" in tok("a", "b")
        if pair:
            features["token_type_ids"] = numbers

        def encoder(rows: dict[str, list]) -> dict[str, Any]:
            columns = [rows[column] for column in texts]
            out = tok(*columns, truncation=True, max_length=self.run.data.max_length, return_attention_mask=False)
            ids = [ids or [empty] for ids in out["input_ids"]]
            types = {"token_type_ids": [t or [0] for t in out["token_type_ids"]]} if pair else {}
            return {"input_ids": ids, "label": labels.codes.of(rows)} | types

        return encoder, features

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        column = self.options.labels["task.label"]
        codes = labels.Codes(column, facts["labels"], facts["label_values"])
        make = stream.maker(*self.encoder(folder, LabelVocab(codes, []), "train", "the stream"))

        def known(rows: Dataset) -> pa.RecordBatch:
            if unknown := set(labels.distinct(rows, codes.column, "train")) - codes.place.keys():
                raise RunError(
                    "LS3010",
                    f"task.label: the train split has a label that was missing when training began: {unknown.pop()!r}",
                )
            return make(rows)

        return known

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        facts = self.prepared.facts
        self.labels: list[str] = facts["numbers"] if self.options.regression else facts["labels"]
        counts, examples = facts.get("of_label", []), len(self.splits["train"])
        self.set_objective(objective_of(self.options)(self.options, self.labels, counts, examples))
        self.has_types = "token_type_ids" in self.splits["train"].names

    def encodes_token_types(self, tok: Any) -> bool:
        if len(self.options.text_columns) == 1:
            return False
        return models.takes_types(model_configs.load_config(self.run.model), self.head, True)

    @property
    def config_entries(self) -> dict[str, Any]:
        return models.named(self.labels) | {"problem_type": self.objective.problem}

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        inputs = self.padded_texts(columns, rows)  # [B, T]
        if self.has_types:
            inputs["token_type_ids"] = columns.ragged("token_type_ids").padded(rows, 0)[0]
        return inputs, self.objective.targets(columns, rows)  # [B], or [B, C]

    def inputs_shown(self, rows: np.ndarray, batch: MicroBatch) -> dict[str, list[str]]:
        return {"text": self.decoded(batch.inputs["input_ids"])}

    def set_export_entries(self, config: Any) -> None:
        self.keep_threshold(config)

    def input_columns(self) -> tuple[str, ...]:
        return tuple(self.options.text_columns.values())

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield `label`, its `score`, and the `scores` of all labels, which sum to 1; for multi-label `labels` and
        `scores`; for regression `value`, or `values` by name."""
        model, tok = models.exported(self.head, folder, self.run.model)
        options = self.options
        names = [model.config.id2label[code] for code in range(model.config.num_labels)]
        objective = objective_of(options)(options, names, [], 0)
        threshold = self.threshold_of(objective, folder)
        pads, left = models.pads(model, self.head, tok), models.pads_left(model.config, self.head)

        def encoded(row: Sequence[str]) -> dict[str, list[int]]:
            tokens = tok(*row, truncation=True, max_length=self.run.data.max_length)
            types = {"token_type_ids": tokens["token_type_ids"] or [0]} if "token_type_ids" in tokens else {}
            return {"input_ids": tokens["input_ids"] or [_instead_of_none(tok)]} | types

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            logits = model(**inference.padded([encoded(row) for row in rows], pads, left)).logits  # [B, C]
            return objective.answers(logits, threshold)

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        kind: type[Objective] = SeveralLabels if "labels" in answer else RegressionObjective
        if "label" in answer:
            kind = OneLabel
        return kind.format_answer(answer) + "  " + "\t".join(row)


@dataclass(frozen=True)
class LabelVocab:
    """The labels of the splits."""

    codes: LabelCodes
    notes: list[str]  # on labels that differ from the model's config
    counts: list[int] | None = None  # examples per label, in a stream

    def counts_in(self, data: TextData) -> list[int]:
        """Number of train examples per label."""
        return self.codes.counts(data.splits["train"]) if self.counts is None else self.counts


def _as_the_model(
    section: ModelSection, options: ClassificationOptions, codes: LabelCodes
) -> tuple[LabelCodes, list[str]]:
    """Reorder labels to match the model's outputs, with notes. Errors: `RunError`."""
    notes = head_labels.problem_notes(section, heads.CLASSIFICATION, objective_of(options).problem, len(codes.names))
    if options.regression:
        return codes, notes
    ordered = head_labels.in_model_order(section, heads.CLASSIFICATION, codes.names, codes.values)
    return codes.reordered(ordered.names, ordered.values), ordered.notes + notes


def _of(
    rows: Stream,
    section: ModelSection,
    types: Mapping[str, str] | None,
    options: ClassificationOptions,
    others: dict[str, Dataset],
) -> LabelVocab:
    """Read the labels of a stream and of the other splits. `types`: `data.types`. Errors: `RunError`."""
    column = options.labels["task.label"]
    counts = rows.gather(partial(labels.count_labels, column=column), "labels", "looking for the labels of the shards")
    train, examples = labels.merge_counts(counts, column, partial(_first_of, rows=rows, column=column))
    splits, notes = {"train": train} | others, list[str]()
    if row_files.are_texts(rows.files) and column not in (types or ()):
        splits, notes = labels.numbered(splits, column)
    codes = labels.codes_of(splits, column, options.label_names, rows.files[0].name)
    ordered, more = _as_the_model(section, options, codes)
    texts = {str(value): count for value, count in examples.items()}
    return LabelVocab(ordered, notes + more, [examples.get(v, texts.get(str(v), 0)) for v in ordered.values])


def _first_of(kind: type, rows: Stream, column: str) -> str:
    """Location of the first label of a type in a stream, for a message."""
    for part, file, chunk, used in rows.walk():
        if any(type(label) is kind for label in used[column]):
            return f"in rows {chunk.row:,} to {chunk.row + chunk.rows - 1:,} of {part.display_name(file)}"
    return "somewhere"


def _instead_of_none(tok: Any) -> int:
    """Token that replaces an empty encoding: without special tokens, a tokenizer may encode a text to nothing."""
    return int(tok.eos_token_id if tok.eos_token_id is not None else tok.pad_token_id)
