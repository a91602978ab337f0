"""Text classification and regression with any model that `AutoModelForSequenceClassification` knows.

In: a column of texts (or two), and what is learned of them: one label, several, or numbers (objectives/). Out: losses
from sums; scores from sums and from predictions that are gathered in the order of the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import Run, RunError
from lockstep.data import labels, missing_values, source, splitting, stream, tokenizer
from lockstep.data.stream import Stream
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import VERSION, Columns, Make, Prepared, content, digest, encode, encoded
from lockstep.tasks.abilities import Streams
from lockstep.tasks.label_task import LabelTask
from lockstep.tasks.objectives.numbers import RegressionObjective
from lockstep.tasks.objectives.objective import LabelCodes, Objective
from lockstep.tasks.objectives.one_label import OneLabel, whole_numbers
from lockstep.tasks.objectives.options import ClassificationOptions
from lockstep.tasks.objectives.several_labels import SeveralLabels
from lockstep.tasks.task import spread_rows
from lockstep.tasks.text_task import TextTask

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch
    from lockstep.tasks.models.decoding import Decoding


def objective_of(options: ClassificationOptions) -> type[Objective]:
    """What is learned."""
    return RegressionObjective if options.regression else SeveralLabels if options.multi_label else OneLabel


class Classification(TextTask, Streams, LabelTask):
    """One label a text."""

    Options = ClassificationOptions
    head = "classification"
    column_keys = ("text", "label")
    default_model = "distilbert/distilbert-base-uncased"
    pipeline = "text-classification"
    display_keys = ("samples",)
    row_is_example = True

    @property
    def usage(self) -> str:
        said = '"some text"' if self.options.text_pair is None else '{"text": "some text", "text_pair": "another text"}'
        return super().usage.replace('"some text"', said)

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        options = ClassificationOptions.model_validate(run.task.options)
        asked, kind = options.columns | options.labels, objective_of(options)
        data = source.load(run.data, run.seed, columns=asked, tokens=TokenCounts.of(run))
        splits = dict(data.splits)
        texts, learned = list(options.columns.values()), list(options.labels.values())
        for split, dataset in data.splits.items():
            hidden = split == "test" and all(labels.hidden(dataset, column) for column in learned)
            if hidden and run.data.test is None:
                del splits["test"]  # benchmarks hide the labels of their test split, or leave them out
                continue
            missing_values.present(dataset, asked, split, data.name)
        for split, dataset in splits.items():
            splits[split] = _whole(dataset, options, split, data.name, run.data.drop_missing)
        rows = cls.stream(run).found(splits, texts) if run.data.stream else None
        codes, counts = (kind.codes(splits, options, data.name), []) if rows is None else _of(rows, options, splits)

        def cut(train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
            return kind.cut(codes, train, share, seed, key)

        splits, left_out = splitting.deduplicate_and_split(data, splits, run, texts, learned, cut)
        counts = codes.counts(splits["train"]) if rows is None else counts
        examples = len(splits["train"]) if rows is None else sum(counts)
        kind(options, codes.names, counts, examples)  # refuses weights and thresholds of none of them
        hashes = {split: content(dataset, [*texts, *learned]) for split, dataset in splits.items()}

        def batches(train: Dataset) -> Iterator[list[str]]:
            for start in range(0, len(train), 1000):
                some = train[start : start + 1000]
                yield [text for column in texts for text in some[column]]

        if rows is not None:
            folder = rows.tokenizer(run, batches)
        else:
            folder = tokenizer.prepare(run, batches(splits["train"]), hashes["train"])
        _check_model(run)
        files = {}
        kept = options.model_dump(include={"text", "text_pair", "label", "label_names"})
        kept |= {} if kind is OneLabel else {"learned": kind.problem}
        for split, dataset in splits.items():
            key = digest(VERSION, hashes[split], folder.name, run.data.max_length, kept, codes.names)
            files[split] = _encode(run, dataset, options, codes, str(folder), key)
        called = {"numbers": codes.names} if options.regression else {"labels": codes.names, "of_label": counts}
        facts: dict[str, Any] = called | {"source": data.name}
        facts["label_values"] = codes.values
        if not options.regression:
            facts |= labels.alike(dict(zip(codes.names, counts, strict=False)))
        if rows is not None:
            key = digest(VERSION, folder.name, run.data.max_length, kept, codes.names, facts["label_values"])
            index = rows.index(cls.example_maker(run, str(folder), facts), key)
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
        facts |= left_out
        if data.name == source.BUILTIN and learned == ["label"] and kind is OneLabel:
            facts["best_possible"] = {
                split: {"accuracy": float(np.mean(np.array(d["label"]) == np.array(d["true_label"])))}
                for split, d in splits.items()
            }
        return Prepared(digest(stream.names_of(files), codes.names), files, str(folder), facts)

    @classmethod
    def unsupported_keys(cls, run: Run) -> dict[str, str]:
        options = ClassificationOptions.model_validate(run.task.options)
        if run.data.stream and objective_of(options) is not OneLabel:
            return {
                "data.stream": "it goes with one label a text, and not with multi_label or regression; leave it out"
            }
        return {}

    @classmethod
    def stream(cls, run: Run) -> Stream:
        options = ClassificationOptions.model_validate(run.task.options)
        asked = options.columns | options.labels

        def whole(rows: Dataset, name: str) -> Dataset:
            missing_values.present(rows, asked, "train", name)
            rows = missing_values.complete(rows, asked, "train", name, run.data.drop_missing)
            rows = missing_values.texts(rows, options.columns, "train", name, run.data.drop_missing)
            return OneLabel.readable(rows, options)

        return Stream(run.data, asked, whole)

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        options = ClassificationOptions.model_validate(run.task.options)
        codes = labels.Codes(options.labels["task.label"], facts["labels"], facts["label_values"])
        encoder, features = _encoder(run, options, codes, folder)
        schema = pa.schema(list(features.arrow_schema))

        def make(rows: Dataset) -> pa.RecordBatch:
            if unknown := set(labels.distinct(rows, codes.column, "train")) - codes.place.keys():
                raise RunError(f"task.label: the train split has a label that it had not before: {unknown.pop()!r}")
            return encoded(rows[:], encoder, schema)

        return make

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        facts = prepared.facts
        self.labels: list[str] = facts["numbers"] if self.options.regression else facts["labels"]
        counts, examples = facts.get("of_label", []), len(self.splits["train"])
        self.learn(objective_of(self.options)(self.options, self.labels, counts, examples))
        self.token_types = "token_type_ids" in self.splits["train"].names

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models

        return models.sequence_classifier(self.run, self.tokenizer, self.labels, empty, self.objective.problem)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        import torch

        from lockstep.data.batch import IGNORED, MicroBatch

        blank = len(rows) == 0
        rows = np.zeros(1, dtype=np.int64) if blank else rows
        pad = self.tokenizer.pad_token_id
        ids, mask = columns.ragged("input_ids").padded(rows, int(pad))  # [B, T]
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if self.token_types:
            inputs["token_type_ids"] = torch.from_numpy(columns.ragged("token_type_ids").padded(rows, 0)[0])
        targets = torch.from_numpy(self.objective.targets(columns, rows))  # [B], or [B, C]
        return MicroBatch(index, inputs, torch.full_like(targets, IGNORED) if blank else targets)

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        rows = spread_rows(columns, self.options.samples)
        if len(rows) == 0:
            return []
        batch = self.collate(columns, rows, 0)
        answers = self.objective.answers(forward(batch.inputs).float(), self.threshold)
        texts = self.tokenizer.batch_decode(batch.inputs["input_ids"].tolist(), skip_special_tokens=True)
        return [
            {
                "text": text.strip(),
                "predicted": self.objective.short_answer(answer),
                "label": self.objective.format_target(target),
            }
            for text, answer, target in zip(texts, answers, batch.targets, strict=True)
        ]

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        return tuple(ClassificationOptions.model_validate(run.task.options).columns.values())

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """`label`, its `score`, and the `scores` of all labels, which add up to 1; of several labels `labels` and
        `scores`; of numbers `value`, or `values` by name."""
        from lockstep.tasks.models import batched_inference, models

        model, tok = models.exported("classification", folder, run)
        options = ClassificationOptions.model_validate(run.task.options)
        names = [model.config.id2label[code] for code in range(model.config.num_labels)]
        objective = objective_of(options)(options, names, [], 0)
        threshold = cls.threshold_of(objective, folder)
        pads = {"input_ids": int(tok.pad_token_id), "token_type_ids": 0}

        def encoded(row: Sequence[str]) -> dict[str, list[int]]:
            found = tok(*row, truncation=True, max_length=run.data.max_length)
            types = {"token_type_ids": found["token_type_ids"] or [0]} if "token_type_ids" in found else {}
            return {"input_ids": found["input_ids"] or [_instead_of_none(tok)]} | (types if len(row) == 2 else {})

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            logits = model(**batched_inference.padded([encoded(row) for row in rows], pads)).logits  # [B, C]
            return objective.answers(logits, threshold)

        return batched_inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        kind = SeveralLabels if "labels" in answer else OneLabel if "label" in answer else RegressionObjective
        return kind.format_answer(answer) + "  " + "\t".join(row)

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        model: Any = self.model()
        self.keep_threshold(model.config)
        models.save(model, weights, self.tokenizer, folder, self.run)


# -- checks ----------------------------------------------------------------------------------------------------------


def _whole(dataset: Dataset, options: ClassificationOptions, split: str, name: str, drop: bool) -> Dataset:
    """The rows with texts and a label. Errors: `RunError`."""
    found = missing_values.complete(dataset, options.columns | options.labels, split, name, drop)
    found = objective_of(options).readable(missing_values.texts(found, options.columns, split, name, drop), options)
    whole = len(found) == len(dataset) or options.multi_label or options.regression
    return found if whole else whole_numbers(found, options.labels["task.label"])


def _of(rows: Stream, options: ClassificationOptions, others: dict[str, Dataset]) -> tuple[labels.Codes, list[int]]:
    """The codes of the labels of a stream and of the other splits, and how many examples each has in the stream.
    Errors: `RunError`."""
    column = options.labels["task.label"]
    found = rows.told(partial(labels.count_labels, column=column), "labels", "looking for the labels of the shards")
    train, held = labels.merge_counts(found, column)
    codes = labels.codes_of({"train": train} | others, column, options.label_names, rows.files[0].name)
    return codes, [held[value] for value in codes.place]


def _check_model(run: Run) -> None:
    from lockstep.tasks.models import models

    models.check(run)


# -- encoding --------------------------------------------------------------------------------------------------------


def _instead_of_none(tok: Any) -> int:
    """The token that is read where a text has none: a tokenizer without special tokens makes nothing of some."""
    return int(tok.eos_token_id if tok.eos_token_id is not None else tok.pad_token_id)


def _encode(
    run: Run, dataset: Dataset, options: ClassificationOptions, codes: LabelCodes, folder: str, key: str
) -> str:
    encoder, features = _encoder(run, options, codes, folder)
    read = [*options.columns.values(), *options.labels.values()]
    return encode(dataset.select_columns(list(dict.fromkeys(read))), encoder, features, key)


def _encoder(
    run: Run, options: ClassificationOptions, codes: LabelCodes, folder: str
) -> tuple[Callable[[dict[str, list]], dict[str, Any]], Features]:
    """What makes tokens and labels of rows, and what these are."""
    import datasets

    texts = list(options.columns.values())
    tok: Any = tokenizer.load(folder, run.model.trust_remote_code)
    empty = _instead_of_none(tok)
    numbers = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": numbers, "label": objective_of(options).feature()})
    if pair := len(texts) == 2:
        probe = tok("a", "b")
        pair = "token_type_ids" in probe and "token_type_ids" in tok.model_input_names
    if pair:
        features["token_type_ids"] = numbers

    def encoder(rows: dict[str, list]) -> dict[str, Any]:
        out = tok(
            *(rows[column] for column in texts),
            truncation=True,
            max_length=run.data.max_length,
            return_attention_mask=False,
        )
        found: dict[str, Any] = {
            "input_ids": [ids or [empty] for ids in out["input_ids"]],
            "label": codes.of(rows),
        }
        if pair:
            found["token_type_ids"] = [t or [0] for t in out["token_type_ids"]]
        return found

    return encoder, features
