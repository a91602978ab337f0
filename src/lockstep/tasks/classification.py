"""Text classification with any model that `AutoModelForSequenceClassification` knows.

In: a column of texts (or two) and a column of integer or string labels. Out: loss, accuracy and macro F1, all from
sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lockstep.config.run import Run, RunError
from lockstep.data import apart, labels, missing, scan, source, tokenizer
from lockstep.data.tokens import VERSION, Columns, Prepared, content, digest, encode
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding

MOST_CLASSES = 100  # of which a table of true against predicted labels is counted


class ClassificationOptions(BaseModel):
    """The task's own keys in the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str = Field("text", description="column of the text")
    text_pair: str | None = Field(None, description="column of a second text, for questions about pairs")
    label: str = Field("label", description="column of the label: integers, strings, or true and false")
    label_names: list[str] | None = Field(
        None, description="names of integer labels, in order; default: from the data set"
    )
    samples: int = Field(3, ge=0, description="predictions to show after each evaluation")

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> the column of texts that it names."""
        pair = {} if self.text_pair is None else {"task.text_pair": self.text_pair}
        return {"task.text": self.text} | pair


class Classification(Task):
    """One label a text."""

    Options = ClassificationOptions
    head = "classification"
    pipeline = "text-classification"
    shown = ("samples",)

    @property
    def usage(self) -> str:
        said = '"some text"' if self.options.text_pair is None else '{"text": "some text", "text_pair": "another text"}'
        return super().usage.replace('"some text"', said)

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        options = ClassificationOptions.model_validate(run.task.options)
        data = source.load(run.data, run.seed, columns=options.columns | {"task.label": options.label})
        splits = dict(data.splits)
        texts = list(options.columns.values())
        for split, dataset in data.splits.items():
            if split == "test" and run.data.test is None and labels.hidden(dataset, options.label):
                del splits["test"]  # benchmarks hide the labels of their test split, or leave them out
                continue
            missing.present(dataset, options.columns | {"task.label": options.label}, split, data.name)
        for split, dataset in splits.items():
            splits[split] = _whole(dataset, options, split, data.name, run.data.drop_missing)
        codes = labels.codes_of(splits, options.label, options.label_names, data.name)

        def cut(train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
            return _cut(train, codes.of_all(train), share, seed, key)

        splits, left_out = apart.kept(data, splits, run, texts, [options.label], cut)
        hashes = {split: content(dataset, [*texts, options.label]) for split, dataset in splits.items()}

        def batches() -> Iterator[list[str]]:
            for start in range(0, len(splits["train"]), 1000):
                rows = splits["train"][start : start + 1000]
                yield [text for column in texts for text in rows[column]]

        folder = tokenizer.prepare(run, batches(), hashes["train"])
        _check_model(run)
        files = {}
        for split, dataset in splits.items():
            asked = options.model_dump(exclude={"samples"})
            key = digest(VERSION, hashes[split], folder.name, run.data.max_length, asked, codes.names)
            files[split] = _encode(run, dataset, texts, codes, str(folder), key)
        facts: dict[str, Any] = {"labels": codes.names, "source": data.name} | left_out
        if data.name == source.BUILTIN:
            facts["best_possible"] = {
                split: {"accuracy": float(np.mean(np.array(d["label"]) == np.array(d["true_label"])))}
                for split, d in splits.items()
            }
        tokens = sorted((split, Path(file).name) for split, file in files.items())  # wherever the cache is
        return Prepared(digest(tokens, codes.names), files, str(folder), facts)

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.tokenizer = tokenizer.load(prepared.tokenizer, run.model.trust_remote_code)
        self.options = ClassificationOptions.model_validate(run.task.options)
        self.labels: list[str] = prepared.facts["labels"]
        self.token_types = "token_type_ids" in self.splits["train"].names

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models

        return models.sequence_classifier(self.run, self.tokenizer, self.labels, empty)

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
        targets = torch.from_numpy(columns.flat("label")[rows].astype(np.int64))  # [B]
        return MicroBatch(index, inputs, torch.full_like(targets, IGNORED) if blank else targets)

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return len(rows)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.logits.float(), targets, reduction="sum")  # IGNORED targets count for nothing

    def score(self, forward: Callable[[Mapping[str, Tensor]], Tensor], batch: MicroBatch) -> Sums:
        import torch
        from torch.nn.functional import cross_entropy, one_hot

        logits = forward(batch.inputs).float()  # [B, C]
        real = batch.targets >= 0
        targets, predicted = batch.targets[real], logits[real].argmax(dim=-1)
        classes = len(self.labels)
        known, guessed = one_hot(targets, classes).double(), one_hot(predicted, classes).double()  # [B, C]
        table = {"confusion": known.T @ guessed} if classes <= MOST_CLASSES else {}  # [C, C]: true, predicted
        return table | {
            "loss": cross_entropy(logits, batch.targets, reduction="sum").double(),
            "examples": real.sum().double(),
            "right": (targets == predicted).sum().double(),
            "of_class": one_hot(targets, classes).sum(0).double(),  # [C]
            "predicted": one_hot(predicted, classes).sum(0).double(),  # [C]
            "right_of_class": (one_hot(targets, classes) * (targets == predicted)[:, None])
            .sum(0)
            .to(torch.float64),  # [C]
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Macro F1 is the mean over classes that occur or are predicted of 2 right / (true + predicted), as
        scikit-learn's."""
        count = float(sums["examples"])
        both = sums["of_class"] + sums["predicted"]
        f1 = 2 * sums["right_of_class"][both > 0] / both[both > 0]
        return {
            "loss": float(sums["loss"]) / count,
            "accuracy": float(sums["right"]) / count,
            "macro_f1": float(f1.mean()),
        }

    def tables(self, sums: Sums) -> dict[str, Any]:
        if "confusion" not in sums:
            return {}
        return {"confusion": {"labels": self.labels, "counts": sums["confusion"].long().tolist()}}

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        rows = self.shown_rows(columns, self.options.samples)
        if len(rows) == 0:
            return []
        batch = self.collate(columns, rows, 0)
        predicted = forward(batch.inputs).argmax(dim=-1).tolist()
        texts = self.tokenizer.batch_decode(batch.inputs["input_ids"].tolist(), skip_special_tokens=True)
        return [
            {"text": text.strip(), "predicted": self.labels[guess], "label": self.labels[label]}
            for text, guess, label in zip(texts, predicted, batch.targets.tolist(), strict=True)
        ]

    @classmethod
    def asked(cls, run: Run) -> tuple[str, ...]:
        return tuple(ClassificationOptions.model_validate(run.task.options).columns.values())

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """`label`, its `score`, and the `scores` of all labels, which add up to 1."""
        from lockstep.tasks.models import asking, models

        model, tok = models.exported("classification", folder, run)
        pads = {"input_ids": int(tok.pad_token_id), "token_type_ids": 0}

        def encoded(row: Sequence[str]) -> dict[str, list[int]]:
            found = tok(*row, truncation=True, max_length=run.data.max_length)
            types = {"token_type_ids": found["token_type_ids"] or [0]} if "token_type_ids" in found else {}
            return {"input_ids": found["input_ids"] or [_instead_of_none(tok)]} | (types if len(row) == 2 else {})

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            chances = model(**asking.padded([encoded(row) for row in rows], pads)).logits.softmax(-1)  # [B, C]
            found = []
            for row in chances.tolist():
                best = max(range(len(row)), key=row.__getitem__)
                scores = {model.config.id2label[code]: chance for code, chance in enumerate(row)}
                found.append({"label": model.config.id2label[best], "score": row[best], "scores": scores})
            return found

        return asking.answers(rows, answer)

    @classmethod
    def told(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        best = sorted(answer["scores"].items(), key=lambda entry: -entry[1])[:3]
        return ", ".join(f"{label} {chance:.3f}" for label, chance in best) + "  " + "\t".join(row)

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run)


# -- checks ----------------------------------------------------------------------------------------------------------


def _whole(dataset: Dataset, options: ClassificationOptions, split: str, name: str, drop: bool) -> Dataset:
    """The rows with texts and a label. Errors: `RunError`."""
    import datasets

    column = options.label
    found = missing.complete(dataset, options.columns | {"task.label": column}, split, name, drop)
    found = labels.readable(missing.texts(found, options.columns, split, name, drop), column)
    if len(found) == len(dataset) or not isinstance(found[0][column], str):
        return found
    if all(re.fullmatch("-?[0-9]+", label) for label in scan.distinct(found, column)):
        found = found.cast_column(column, datasets.Value("int64"))  # as they would have been, had none been missing
    return found


def _cut(train: Dataset, codes: np.ndarray, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
    """Cut a share off the training split: seeded, and every class in proportion. Errors: `RunError`."""
    chosen = []
    random = np.random.default_rng(seed)
    for code in np.unique(codes):
        rows = random.permutation(np.flatnonzero(codes == code))
        chosen.append(rows[: round(len(rows) * share)])
    held = np.sort(np.concatenate(chosen))
    rest = np.setdiff1d(np.arange(len(codes)), held)
    if len(held) == 0 and round(len(codes) * share) > 0:
        raise RunError(
            f"task.label: {len(np.unique(codes))} distinct labels in {len(codes)} rows: no label has enough of them to "
            f"cut a share of {share:g} off ({key}). Is task.label the column meant? If so, give "
            f"data.{key.partition('_')[0]}, or a larger data.{key}"
        )
    if len(held) == 0 or len(rest) == 0:
        raise RunError(f"data.{key}: {share:g} of {len(codes)} examples leaves one of the splits empty")
    return train.select(rest), train.select(held)


def _check_model(run: Run) -> None:
    from lockstep.tasks.models import models

    models.check(run)


# -- encoding --------------------------------------------------------------------------------------------------------


def _instead_of_none(tok: Any) -> int:
    """The token that is read where a text has none: a tokenizer without special tokens makes nothing of some."""
    return int(tok.eos_token_id if tok.eos_token_id is not None else tok.pad_token_id)


def _encode(run: Run, dataset: Dataset, texts: list[str], codes: labels.Codes, folder: str, key: str) -> str:
    import datasets

    tok: Any = tokenizer.load(folder, run.model.trust_remote_code)
    empty = _instead_of_none(tok)
    numbers = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": numbers, "label": datasets.Value("int64")})
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
            "label": codes.of(rows[codes.column]),
        }
        if pair:
            found["token_type_ids"] = [t or [0] for t in out["token_type_ids"]]
        return found

    return encode(dataset.select_columns(list(dict.fromkeys([*texts, codes.column]))), encoder, features, key)
