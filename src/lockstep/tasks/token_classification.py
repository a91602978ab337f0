"""Named entities and the like: a tag for every word, with any model that `AutoModelForTokenClassification` knows.

In: a column of lists of words and one of lists of tags. Out: loss, accuracy, and precision, recall and F1 of whole
entities, all from sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lockstep.config.run import Run, RunError
from lockstep.data import column_scan, labels, lm_documents, missing_values, source, splitting, stream, tokenizer
from lockstep.data.stream import Stream
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import VERSION, Columns, Make, Prepared, content, digest, encode
from lockstep.tasks.metric_arrays import listed
from lockstep.tasks.models.tags import entities, parts
from lockstep.tasks.per_token import PerToken
from lockstep.tasks.task import spread_rows

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor, nn

    from lockstep.data.batch import Sums
    from lockstep.tasks.models.decoding import Decoding

_SKIPPED = -100  # the tag of a word's further tokens; IGNORED in batch.py, which imports torch


class TokenClassificationOptions(BaseModel):
    """The task's own keys in the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    words: str = Field("tokens", description="column of lists of words")
    tags: str = Field("tags", description="column of lists of tags, one a word, as texts or as numbers with names")
    samples: int = Field(3, ge=0, description="texts to show after each evaluation, with the entities found in them")


class TokenClassification(PerToken):
    """One tag a word; a word's first token has it."""

    Options = TokenClassificationOptions
    head = "token_classification"
    column_keys = ("words", "tags")
    default_model = "distilbert/distilbert-base-cased"
    pipeline = "token-classification"
    row_is_example = True
    display_keys = ("samples",)
    metric_names = ("accuracy", "precision", "recall", "f1")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, run: Run) -> Prepared:
        options = TokenClassificationOptions.model_validate(run.task.options)
        asked = {"task.words": options.words, "task.tags": options.tags}
        data = source.load(run.data, run.seed, columns=asked, tokens=TokenCounts.of(run))
        splits = {s: _rows(found, options, s, data.name, run.data.drop_missing) for s, found in data.splits.items()}
        rows = cls.stream(run).found(splits, ["words"]) if run.data.stream else None
        if rows is not None:
            told = rows.told(lambda some: sorted(_tags(some)), "tags", "looking for the tags of the shards")
            names = sorted({tag for each in told for tag in each})
        else:
            names = sorted(_tags(splits["train"]))
        parts(names)  # refuses tags of no scheme
        splits, left_out = splitting.deduplicate_and_split(data, splits, run, ["words"], ["tags"], lm_documents.cut)
        for split, dataset in splits.items():
            if unknown := _tags(dataset) - set(names):
                raise RunError(
                    f"task.tags: the {split} split of {data.name} has the tag {min(unknown)!r}, which the training "
                    "split has not"
                )
        hashes = {split: content(dataset, ["words", "tags"]) for split, dataset in splits.items()}

        def batches(train: Dataset) -> Iterator[list[str]]:
            for start in range(0, len(train), 1000):
                yield [" ".join(words) for words in train[start : start + 1000]["words"]]

        if rows is not None:
            folder = rows.tokenizer(run, batches)
        else:
            folder = tokenizer.prepare(run, batches(splits["train"]), hashes["train"])
        from lockstep.tasks.models import models

        models.check(run, "token_classification")
        files = {}
        for split, dataset in splits.items():
            key = digest("token classification", VERSION, hashes[split], folder.name, run.data.max_length, names)
            files[split] = _encode(run, dataset, names, str(folder), key)
            if not (columns := Columns(files[split])).flat("count")[np.arange(len(columns))].any():
                raise RunError(
                    f"task.words: no word of the {split} split of {data.name} has a token within the "
                    f"{run.data.max_length} of data.max_length"
                )
        facts: dict[str, Any] = {"source": data.name, "labels": names}
        if rows is None and labels.alike(dict.fromkeys(names, 0)):
            scanned = column_scan.lists(splits["train"], "tags")
            facts |= labels.alike(Counter(tag for _, part in scanned for tags in part for tag in tags))
        if rows is not None:
            key = digest("token classification", VERSION, folder.name, run.data.max_length, names)
            index = rows.index(cls.example_maker(run, str(folder), facts), key)
            files, left_out = {"train": str(index)} | files, stream.facts(index, left_out)
        return Prepared(digest(stream.names_of(files), names), files, str(folder), facts | left_out)

    @classmethod
    def stream(cls, run: Run) -> Stream:
        options = TokenClassificationOptions.model_validate(run.task.options)
        whole = partial(_rows, options=options, split="train", drop=run.data.drop_missing)
        asked = {"task.words": options.words, "task.tags": options.tags}
        return Stream(run.data, asked, lambda rows, name: whole(rows, name=name))

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        return stream.maker(*_encoder(run, facts["labels"], folder))

    # -- in every process --------------------------------------------------------------------------------------------

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.labels: list[str] = prepared.facts["labels"]
        self.parts = parts(self.labels)

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models

        return models.build(self.run, "token_classification", self.tokenizer, empty, **models.named(self.labels))

    def sums(self, logits: Tensor, targets: Tensor) -> Sums:
        import torch

        real = targets >= 0  # [B, T]
        predicted = logits.argmax(-1)
        kinds = self.kinds
        counts = np.zeros((len(kinds), 3))  # entities of each kind that are there, that are predicted, that are both
        for row in range(len(real)):
            there, found = (self._entities(tags[row][real[row]].tolist()) for tags in (targets, predicted))
            for place, some in enumerate((there, found, there & found)):
                for _, _, kind in some:
                    counts[kinds.index(kind), place] += 1
        return super().sums(logits, targets) | {"entities": torch.from_numpy(counts).to(logits.device)}  # [kinds, 3]

    def _entities(self, places: list[int]) -> set[tuple[int, int, str]]:
        return entities([self.parts[self.labels[place]] for place in places])

    @property
    def kinds(self) -> list[str]:
        """Of entities."""
        return sorted({kind for _, kind in self.parts.values() if kind})

    def tables(self, sums: Sums) -> dict[str, Any]:
        """The scores of each kind of entity."""
        there, found, right = sums["entities"].long().T.tolist()
        counts = {"examples": there, "given": found, "right": right}
        return {"labels": {"of": "kind of entity", "names": self.kinds} | counts} if self.kinds else {}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tags by name: of each example a list, one a word as far as it was read."""
        foretold, wanted = super().predictions(sums, columns, rows)
        return tuple(self._named(each, wanted >= 0) for each in (foretold, wanted))  # type: ignore[return-value]

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """A few examples of several lengths, with every tag among them."""
        places = np.arange(4 * (len(self.labels) + 2)).reshape(4, -1) % len(self.labels)
        there = np.arange(places.shape[1]) >= np.arange(4)[:, None]
        return self._named(places[::-1], there), self._named(places, there)

    def _named(self, places: np.ndarray, there: np.ndarray) -> np.ndarray:
        names = np.array(self.labels, dtype=object)
        return listed([names[row[real]].tolist() for row, real in zip(places, there, strict=True)])

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Precision, recall and F1 of entities whose beginning, end and kind are all right, as seqeval counts them."""
        there, found, right = (float(count) for count in sums["entities"].sum(0))
        return {
            "loss": float(sums["loss"]) / float(sums["targets"]),
            "accuracy": float(sums["right"]) / float(sums["targets"]),
            "precision": right / found if found else 0.0,
            "recall": right / there if there else 0.0,
            "f1": 2 * right / (there + found) if there + found else 0.0,
        }

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
        best = forward(batch.inputs).argmax(-1)
        texts = zip(batch.inputs["input_ids"].tolist(), batch.targets.tolist(), best.tolist(), strict=True)
        return [self._sample(*each) for each in texts]

    def _sample(self, ids: list[int], targets: list[int], best: list[int]) -> dict[str, str]:
        """A text, and its entities, each with its kind."""
        first = [place for place, tag in enumerate(targets) if tag >= 0]
        parts = zip(first, [*first[1:], len(ids)], strict=True)
        words = [str(self.tokenizer.decode(ids[a:b], skip_special_tokens=True)).strip() for a, b in parts]

        def told(tags: list[int]) -> str:
            found = sorted(self._entities([tags[place] for place in first]))
            return ", ".join(f"{' '.join(words[a:b])} ({kind})" for a, b, kind in found) or "none"

        return {"text": " ".join(words), "found": told(best), "right": told(targets)}

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        return (TokenClassificationOptions.model_validate(run.task.options).words,)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """`words`, each with its `label` and that one's `score`; a text is cut at its spaces."""
        from lockstep.tasks.models import batched_inference, models

        model, tok = models.exported("token_classification", folder, run)
        names = model.config.id2label

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            words = [row[0].split() for row in rows]
            read = [tok(w, is_split_into_words=True, truncation=True, max_length=run.data.max_length) for w in words]
            batch = batched_inference.padded(read, {"input_ids": int(tok.pad_token_id)})
            scores, tags = (found.tolist() for found in model(**batch).logits.softmax(-1).max(-1))  # [B, T]
            return [
                {
                    "words": [
                        {"word": words[i][word], "label": names[tags[i][place]], "score": scores[i][place]}
                        for word, place in first_tokens(asked.word_ids(0)).items()
                    ]
                }
                for i, asked in enumerate(read)
            ]

        return batched_inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return " ".join(f"{each['word']}/{each['label']}" for each in answer["words"])

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        models.save(self.model(), weights, self.tokenizer, folder, self.run)


def first_tokens(word_ids: list[int | None]) -> dict[int, int]:
    """Word -> the place of its first token."""
    places: dict[int, int] = {}
    for place, word in enumerate(word_ids):
        if word is not None:
            places.setdefault(word, place)
    return places


# -- preparing -------------------------------------------------------------------------------------------------------


def _rows(dataset: Dataset, options: TokenClassificationOptions, split: str, name: str, drop: bool) -> Dataset:
    """Columns `words` and `tags`, both lists of texts, of the rows that have a word, and a tag for every word. Errors:
    `RunError`."""
    import datasets

    columns = {"task.words": options.words, "task.tags": options.tags}
    missing_values.present(dataset, columns, split, name)
    names = getattr(getattr(dataset.features[options.tags], "feature", None), "names", None)
    found = []  # whether there is a word at all; which rows lack words, and which tags
    for first, part in column_scan.lists(dataset, options.words, options.tags):
        for row, (said, marked) in enumerate(part, first):
            if None not in (said, marked) and not (
                isinstance(said, list) and isinstance(marked, list) and len(said) == len(marked)
            ):
                raise RunError(
                    f"task.tags: row {row} of the {split} split of {name} must hold as many tags as words, in lists; "
                    f"it holds {str(said)[:60]} and {str(marked)[:60]}"
                )
        wordless = [not said or any(_nothing(word) for word in said) for said, _ in part]
        tagless = [marked is None or any(_nothing(tag, names) for tag in marked) for _, marked in part]
        found.append((any(said for said, _ in part), np.array(wordless), np.array(tagless)))
    if not any(some for some, *_ in found):
        raise RunError(f"task.words: the {split} split of {name} holds no words")
    columns_lacking = ((options.words, [w for _, w, _ in found]), (options.tags, [t for *_, t in found]))
    lacks = {key: (column, np.concatenate(part)) for key, (column, part) in zip(columns, columns_lacking, strict=True)}
    whole = missing_values.without(dataset, lacks, split, name, drop)

    def converted(rows: dict[str, list]) -> dict[str, list]:
        words = [[str(word) for word in said] for said in rows[options.words]]
        tags = [[names[tag] if names else str(tag) for tag in marked] for marked in rows[options.tags]]
        return {"words": words, "tags": tags}

    texts = datasets.List(datasets.Value("string"))
    kept = {c: whole.features[c] for c in whole.column_names if c == source.SOURCE}
    features = datasets.Features({"words": texts, "tags": texts} | kept)
    left = [c for c in whole.column_names if c not in kept]
    return whole.map(converted, batched=True, remove_columns=left, features=features)


def _tags(dataset: Dataset) -> set[str]:
    return {tag for _, part in column_scan.lists(dataset, "tags") for tags in part for tag in tags}


def _nothing(value: Any, names: list[str] | None = None) -> bool:
    """A word or tag that is none; a tag -1 of a data set with `names` is none."""
    return value is None or not str(value).strip() or (names is not None and value == -1)


def _encode(run: Run, dataset: Dataset, names: list[str], folder: str, key: str) -> str:
    return encode(dataset, *_encoder(run, names, folder), key)


def _encoder(run: Run, names: list[str], folder: str) -> tuple[Callable[[dict[str, list]], dict[str, Any]], Features]:
    """What makes tokens and tags of rows, and what these are."""
    import datasets

    tok: Any = tokenizer.load(folder, run.model.trust_remote_code)
    if not tok.is_fast:
        raise RunError("tokenizer: it does not tell which word its tokens belong to")
    place_of = {name: code for code, name in enumerate(names)}
    numbers = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": numbers, "targets": numbers, "count": datasets.Value("int64")})

    def encoder(rows: dict[str, list]) -> dict[str, list]:
        found = tok(rows["words"], is_split_into_words=True, truncation=True, max_length=run.data.max_length)
        targets = []
        for row, tags in enumerate(rows["tags"]):
            line = [_SKIPPED] * len(found["input_ids"][row])
            for word, place in first_tokens(found.word_ids(row)).items():
                line[place] = place_of[tags[word]]
            targets.append(line)
        counts = [sum(tag != _SKIPPED for tag in line) for line in targets]
        return {"input_ids": found["input_ids"], "targets": targets, "count": counts}

    return encoder, features
