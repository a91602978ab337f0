"""Token classification, such as named entities: a tag for each word, with any model that
`AutoModelForTokenClassification` knows.

In: a column of lists of words and one of lists of tags. Out: loss, accuracy, and precision, recall and F1 of whole
entities, all from sums.

Tags may use any common scheme: IOB1, IOB2, IOE1, IOE2, IOBES, BILOU, BMES or BMEWO. One parser reads all of them,
because their letters do not conflict: a word is the first (B), inside (I, M), the last (E, L), or the only one (S, U,
W) of an entity.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from lockstep.config.run import RunError
from lockstep.config.sections import Section
from lockstep.data import column_types, labels, source, tokenizer, usable_rows
from lockstep.data.arrow_cache import Columns, Make, Prepared
from lockstep.data.batch import IGNORED, MicroBatch, Sums
from lockstep.data.column_types import Kind
from lockstep.data.stream import Stream
from lockstep.tasks.models import head_labels, heads
from lockstep.tasks.models.head_labels import HeadLabels
from lockstep.tasks.own_metrics import listed
from lockstep.tasks.per_token import PerToken
from lockstep.tasks.task import Forward, Generate
from lockstep.tasks.text_task import Encoder, TextData, in_batches
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset, Features
    from torch import Tensor


_READ = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"}  # -> IOBES
_PREFIX = r"(?P<letter>[^\W\d_])[-_](?P<kind>.+)"  # B-PER, B_PER
_OTHERS = (r"(?P<kind>.+)[-_](?P<letter>[^\W\d_])", r"(?P<letter>[A-Z])(?P<kind>)")  # PER-B, B
_OUTSIDE = ("", "")


def _check_one_kind(rows: Stream) -> None:
    """Check that the chunks of a stream do not mix tags as numbers and as texts. Errors: `RunError`."""
    kinds: dict[type, str] = {}  # type of tag -> first rows with it
    for part in rows.parts:
        column = source.source_columns(part.entry, part.columns)["task.tags"]
        for file in part.files:
            for chunk, some in part.opened(file).walk():
                typed = part.typed(some, file)
                if column not in typed.column_names or getattr(
                    getattr(typed.features[column], "feature", None), "names", None
                ):
                    continue  # names of a parquet file
                for _, lists in usable_rows.lists(typed, column):
                    for tag in (tag for tags in lists for tag in tags or () if tag is not None):
                        if type(tag) not in kinds:
                            where = f"rows {chunk.row:,} to {chunk.row + chunk.rows - 1:,} of {part.display_name(file)}"
                            kinds[type(tag)] = f"{where} hold {repr(tag)[:40]}"
    if len(kinds) > 1:
        raise RunError(
            "LS3460",
            f"task.tags: the train split mixes tags of several kinds: {', '.join(kinds.values())}; write all of them "
            "as strings, or set data.types={COLUMN: text} for the column of the tags",
        )


def parts(tags: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Split tags into an IOBES letter and a kind of entity (_ if a tag is only a letter); both are empty outside
    entities.

    A tag without a letter is a one-word entity of its own kind. Letters are recognized only if some tag of that form
    has B or I, so that similar names (the parts of speech NN-TL, V_S) stay names. Errors: `RunError` for an unknown
    letter among known ones."""
    names = sorted(set(tags))
    marks = {tag for tag in names if tag not in ("O", "o")}
    for form in (_PREFIX, *_OTHERS):
        matches = {tag: match for tag in marks if (match := re.fullmatch(form, tag))}
        letters = {tag: match["letter"].upper() for tag, match in matches.items()}
        letter_of = {tag: letter for tag, letter in letters.items() if letter in _READ}
        if not {"B", "I"} & set(letter_of.values()) or (form != _PREFIX and letter_of.keys() != marks):
            continue
        _refuse_others(letters, {tag: match["kind"] for tag, match in matches.items()})
        read = {tag: (_READ[letter], matches[tag]["kind"] or "_") for tag, letter in letter_of.items()}
        outside = {tag: _OUTSIDE for tag, letter in letters.items() if letter == "O"}
        return {tag: (read | outside).get(tag, _alone(tag)) for tag in names}
    return {tag: _alone(tag) for tag in names}


def _refuse_others(letters: Mapping[str, str], kinds: Mapping[str, str]) -> None:
    """Check that no tag has an unknown letter. Errors: `RunError`."""
    read = {kinds[tag] for tag, letter in letters.items() if letter in _READ}
    others = [tag for tag, letter in letters.items() if letter not in _READ and letter != "O" and kinds[tag] in read]
    if others:
        raise RunError(
            "LS3360",
            f"task.tags: {min(others)!r} does not begin with a letter of a tagging scheme, but other tags do. "
            "Supported schemes are B I O E S, B I L O U, B M E S O and B M E W O; rename such tags",
        )


def _alone(tag: str) -> tuple[str, str]:
    """Letter and kind of a tag without a letter."""
    return _OUTSIDE if tag in ("O", "o") else ("S", tag)


def entities(row: Sequence[tuple[str, str]]) -> set[tuple[int, int, str]]:
    """Entities marked by a row of `parts`: (first word, word after the last, kind). An inside tag that does not follow
    its own kind starts an entity (conlleval's rule)."""
    spans = set()
    start, kind = 0, ""
    for place, (letter, name) in enumerate([*row, _OUTSIDE]):
        if kind and (letter in ("", "B", "S") or name != kind):
            spans.add((start, place, kind))
            kind = ""
        if letter and not kind:
            start, kind = place, name
        if kind and letter in ("S", "E"):
            spans.add((start, place + 1, kind))
            kind = ""
    return spans


class TokenClassificationOptions(Section):
    """The task's own keys in the run file."""

    words: str = Field("tokens", description="column of lists of words")
    tags: str = Field("tags", description="column of lists of tags, one per word, as texts or as numbers with names")
    samples: int = Field(3, ge=0, description="texts shown after each evaluation, with their predicted entities")

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> column name."""
        return {"task.words": self.words, "task.tags": self.tags}


class TokenClassification(PerToken):
    """One tag per word, predicted at its first token."""

    Options = TokenClassificationOptions
    head = heads.TOKEN_CLASSIFICATION
    column_keys = ("words", "tags")
    input_keys = ("words",)
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "words": ("tokens", "words"),
        "tags": ("ner_tags", "tags", "pos_tags", "chunk_tags", "labels"),
    }
    small_model = "bert"
    usual_rate = 3e-5
    default_model = "distilbert/distilbert-base-cased"
    pipeline = "token-classification"
    plain_columns: ClassVar[Mapping[str, str]] = {"words": "words", "tags": "tags"}
    row_is_example = True
    reads_token_types = True
    chunks_loss = False
    cache_name = ("token classification",)
    display_keys = ("samples",)
    metric_names = ("accuracy", "precision", "recall", "f1")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def read_as(cls, options: TokenClassificationOptions) -> dict[str, Kind]:
        return {}  # the columns hold lists

    @classmethod
    def valid_rows(
        cls, rows: Dataset, options: TokenClassificationOptions, split: str, name: str, drop: bool
    ) -> Dataset:
        """Columns `words` and `tags`, both lists of texts, of rows with words and tags; `learnable` compares their
        numbers."""
        import datasets

        columns = options.text_columns
        usable_rows.check_columns(rows, columns, split, name)
        names = getattr(getattr(rows.features[options.tags], "feature", None), "names", None)
        faults = []  # three flags: the split has words, a row has no words, a row has no tags
        kinds: dict[type, str] = {}  # type of tag -> first row with it
        for first, part in usable_rows.lists(rows, options.words, options.tags):
            for row, (row_words, marked) in enumerate(part, first):
                for key, value in zip(columns, (row_words, marked), strict=True):
                    if not isinstance(value, list | None):
                        raise RunError(
                            "LS3411",
                            f"{key}: column {columns[key]!r} of the {split} split of {name} must hold lists; row "
                            f"{row} holds {repr(value)[:60]}",
                        )
                if odd := [tag for tag in marked or () if isinstance(tag, float) and not tag.is_integer()]:
                    raise RunError(
                        "LS3423",
                        f"task.tags: column {options.tags!r} of the {split} split of {name} must hold texts or whole "
                        f"numbers; row {row} holds {odd[0]!r}: correct it, or set data.types={{{options.tags}: text}}",
                    )
                for kind in set(map(type, marked or ())) - kinds.keys() - {type(None)}:
                    first_one = next(tag for tag in marked if type(tag) is kind)
                    kinds[kind] = f"row {row} holds {repr(first_one)[:40]}"
            wordless = [not row_words or any(_nothing(word) for word in row_words) for row_words, _ in part]
            tagless = [  # a row without words may have no tags
                any(_nothing(tag, names) for tag in marked) if marked else marked is None or bool(row_words)
                for row_words, marked in part
            ]
            faults.append((any(row_words for row_words, _ in part), np.array(wordless), np.array(tagless)))
        if len(kinds) > 1:
            raise RunError(
                "LS3400",
                f"task.tags: column {options.tags!r} of the {split} split of {name} mixes tags of several kinds: "
                f"{', '.join(kinds.values())}; write all of them as strings, or set "
                f"data.types={{{options.tags}: text}}",
            )
        if not any(some for some, *_ in faults):
            raise RunError("LS3364", f"task.words: the {split} split of {name} holds no words")
        columns_lacking = ((options.words, [w for _, w, _ in faults]), (options.tags, [t for *_, t in faults]))
        lacks = {key: (column, np.concatenate(p)) for key, (column, p) in zip(columns, columns_lacking, strict=True)}
        whole = usable_rows.without(rows, lacks, split, name, drop)

        def converted(rows: dict[str, list]) -> dict[str, list]:
            words = [[str(word) for word in row_words] for row_words in rows[options.words]]
            tags = [[names[tag] if names else _text_of(tag) for tag in marked] for marked in rows[options.tags]]
            return {"words": words, "tags": tags}

        texts = datasets.List(datasets.Value("string"))
        return source.map_rows(whole, converted, {"words": texts, "tags": texts})

    @classmethod
    def learnable(
        cls, rows: Dataset, options: TokenClassificationOptions, split: str, name: str, drop: bool
    ) -> Dataset:
        """Rows with as many tags as words. Errors: `RunError`."""
        uneven: list[int] = []
        for first, part in usable_rows.lists(rows, "words", "tags"):
            for row, (words, tags) in enumerate(part, first):
                if len(words) == len(tags):
                    continue
                if not drop:
                    raise RunError(
                        "LS3363",
                        f"task.tags: row {row} of the {split} split of {name} has {quantity(len(words), 'word')} and "
                        f"{quantity(len(tags), 'tag')}, {str(words)[:60]} and {str(tags)[:60]}, but each word needs "
                        "one tag; correct the row, or set data.drop_unusable=true to drop such rows",
                    )
                uneven.append(row)
        return rows.select(np.setdiff1d(np.arange(len(rows)), uneven)) if uneven else rows

    @classmethod
    def dedup_columns(cls, options: TokenClassificationOptions) -> tuple[list[str], list[str]]:
        return ["words"], ["tags"]

    def read_labels(self, data: TextData) -> HeadLabels:
        if data.rows is None:
            names = sorted(_tags(data.splits["train"]))
        else:
            of_chunks = data.rows.gather(lambda some: sorted(_tags(some)), "tags", "looking for the tags of the shards")
            names = sorted({tag for tags in of_chunks for tag in tags})
            if any(tag.isdecimal() for tag in names):
                _check_one_kind(data.rows)
        numbers = column_types.whole_numbers(names, strict=True)
        names = sorted(names, key=int) if numbers else names
        values = [int(name) for name in names] if numbers else names
        tags = head_labels.in_model_order(self.run.model, self.head, names, values)
        parts(tags.names)  # refuses unknown tag schemes
        if not self.run.data.drop_unusable:
            self._refuse_unknown(data, tags.names)
        return tags

    @classmethod
    def has_unusable_rows(cls, options: TokenClassificationOptions) -> bool:
        return True

    def with_known_labels(self, data: TextData) -> dict[str, Dataset]:
        known = set(data.labels.names)
        return {s: labels.known_rows(rows, ["tags"], known.issuperset) for s, rows in data.splits.items()}

    def _refuse_unknown(self, data: TextData, names: list[str]) -> None:
        for split, rows in data.splits.items():
            if unknown := _tags(rows) - set(names):
                row, tag = next((row, tag) for row, tag in _tags_by_row(rows) if tag in unknown)
                hint = column_types.same_label_hint(self.options.tags, tag, names)
                raise RunError(
                    "LS3361",
                    f"task.tags: the {split} split of {data.name} has the tag {tag!r} (row {row}), which is not in the "
                    f"train split. {hint}Correct the tag, add examples with it to train, or set "
                    "data.drop_unusable=true to drop such examples",
                )

    @classmethod
    def tokenizer_texts(cls, rows: Dataset, options: TokenClassificationOptions) -> Iterator[list[str]]:
        for batch in in_batches(rows):
            yield [" ".join(words) for words in batch["words"]]

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        return [self.run.data.max_length, data.labels.names]

    def encode_split(self, data: TextData, split: str, folder: Path, tok: Any, key: str) -> tuple[str, list[int]]:
        file, counts = super().encode_split(data, split, folder, tok, key)
        if not (columns := Columns(file)).flat("count")[np.arange(len(columns))].any():
            from lockstep.tasks.models import models

            most = self.run.data.max_length
            raise RunError(
                "LS3362",
                f"task.words: no word of the {split} split of {data.name} has a token within data.max_length "
                f"({most}); {models.longer(self.run.model, 'data.max_length', most)}",
            )
        return file, counts

    def label_names(self, data: TextData) -> list[str]:
        names: list[str] = data.labels.names
        return names

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        tags: HeadLabels = data.labels
        facts: dict[str, Any] = {"labels": tags.names} | ({"notes": tags.notes} if tags.notes else {})
        if data.rows is None and labels.alike(dict.fromkeys(tags.names, 0)):
            scanned = usable_rows.lists(data.splits["train"], "tags")
            facts |= labels.alike(Counter(tag for _, part in scanned for tags in part for tag in tags))
        return facts

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        return super().example_maker(folder, {"labels": HeadLabels(facts["labels"], facts["labels"])})

    def encoder(self, folder: str, labels: HeadLabels, split: str, name: str) -> tuple[Encoder, Features]:
        """Return the function that encodes rows to tokens and tags, and the features of its output."""
        import datasets

        tok: Any = tokenizer.load(folder, self.run.model.trust_remote_code)
        if not tok.is_fast:
            raise RunError(
                "LS3365",
                "tokenizer: it does not report the words of its tokens (no fast tokenizer); choose a model with "
                "a fast tokenizer",
            )
        place_of = {name: code for code, name in enumerate(labels.names)}
        numbers = datasets.List(datasets.Value("int32"))
        features = datasets.Features({"input_ids": numbers, "targets": numbers, "count": datasets.Value("int64")})

        def encoder(rows: dict[str, list]) -> dict[str, list]:
            tokens = tok(rows["words"], is_split_into_words=True, truncation=True, max_length=self.run.data.max_length)
            targets = []
            for row, tags in enumerate(rows["tags"]):
                line = [IGNORED] * len(tokens["input_ids"][row])
                for word, place in first_tokens(tokens.word_ids(row)).items():
                    line[place] = place_of[tags[word]]
                targets.append(line)
            counts = [sum(tag != IGNORED for tag in line) for line in targets]
            return {"input_ids": tokens["input_ids"], "targets": targets, "count": counts}

        return encoder, features

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.labels: list[str] = self.prepared.facts["labels"]
        self.parts = parts(self.labels)

    @property
    def config_entries(self) -> dict[str, Any]:
        from lockstep.tasks.models import models

        return models.named(self.labels)

    def sums(self, logits: Tensor, targets: Tensor) -> Sums:
        import torch

        real = targets >= 0  # [B, T]
        predicted = logits.argmax(-1)
        kinds = self.kinds
        counts = np.zeros((len(kinds), 3))  # per kind: true, predicted and correct entities
        for row in range(len(real)):
            there, predicted_spans = (self._entities(tags[row][real[row]].tolist()) for tags in (targets, predicted))
            for place, some in enumerate((there, predicted_spans, there & predicted_spans)):
                for _, _, kind in some:
                    counts[kinds.index(kind), place] += 1
        return super().sums(logits, targets) | {"entities": torch.from_numpy(counts).to(logits.device)}  # [kinds, 3]

    def _entities(self, places: list[int]) -> set[tuple[int, int, str]]:
        return entities([self.parts[self.labels[place]] for place in places])

    @property
    def kinds(self) -> list[str]:
        """Sorted kinds of entities."""
        return sorted({kind for _, kind in self.parts.values() if kind})

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Scores per kind of entity."""
        there, predicted, right = sums["entities"].long().T.tolist()
        counts = {"examples": there, "given": predicted, "right": right}
        return {"labels": {"of": "kind of entity", "names": self.kinds} | counts} if self.kinds else {}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tag names: one list per example, one tag per word that was not truncated."""
        predicted, labels = super().predictions(sums, columns, rows)
        return tuple(self._named(each, labels >= 0) for each in (predicted, labels))  # type: ignore[return-value]

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Examples of several lengths that contain every tag."""
        places = np.arange(4 * (len(self.labels) + 2)).reshape(4, -1) % len(self.labels)
        there = np.arange(places.shape[1]) >= np.arange(4)[:, None]
        return self._named(places[::-1], there), self._named(places, there)

    def _named(self, places: np.ndarray, there: np.ndarray) -> np.ndarray:
        names = np.array(self.labels, dtype=object)
        return listed([names[row[real]].tolist() for row, real in zip(places, there, strict=True)])

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Precision, recall and F1 of entities with correct boundaries and kind, as in seqeval."""
        there, predicted, right = (float(count) for count in sums["entities"].sum(0))
        return {
            "loss": float(sums["loss"]) / float(sums["targets"]),
            "accuracy": float(sums["right"]) / float(sums["targets"]),
            "precision": right / predicted if predicted else 0.0,
            "recall": right / there if there else 0.0,
            "f1": 2 * right / (there + predicted) if there + predicted else 0.0,
        }

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        best = forward(batch.inputs).argmax(-1)
        texts = zip(batch.inputs["input_ids"].tolist(), batch.targets.tolist(), best.tolist(), strict=True)
        return [self._sample(*each) for each in texts]

    def _sample(self, ids: list[int], targets: list[int], best: list[int]) -> dict[str, str]:
        """A text and its entities with their kinds."""
        first = [place for place, tag in enumerate(targets) if tag >= 0]
        parts = zip(first, [*first[1:], len(ids)], strict=True)
        words = [str(self.tokenizer.decode(ids[a:b], skip_special_tokens=True)).strip() for a, b in parts]

        def described(tags: list[int]) -> str:
            spans = sorted(self._entities([tags[place] for place in first]))
            return ", ".join(f"{' '.join(words[a:b])} ({kind})" for a, b, kind in spans) or "none"

        return {"text": " ".join(words), "found": described(best), "right": described(targets)}

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield `words`, each with its `label` and `score`; a text is split at whitespace."""
        from lockstep.tasks.models import inference, models

        model, tok = models.exported(self.head, folder, self.run.model)
        names = model.config.id2label

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            words = [row[0].split() for row in rows]
            read = [
                tok(w, is_split_into_words=True, truncation=True, max_length=self.run.data.max_length) for w in words
            ]
            batch = inference.padded(read, models.pads(model, self.head, tok))
            scores, tags = (part.tolist() for part in model(**batch).logits.softmax(-1).max(-1))  # [B, T]
            return [
                {
                    "words": [
                        {"word": words[i][word], "label": names[tags[i][place]], "score": scores[i][place]}
                        for word, place in first_tokens(encoding.word_ids(0)).items()
                    ]
                }
                for i, encoding in enumerate(read)
            ]

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return " ".join(f"{each['word']}/{each['label']}" for each in answer["words"])


def first_tokens(word_ids: list[int | None]) -> dict[int, int]:
    """Map each word to the position of its first token."""
    places: dict[int, int] = {}
    for place, word in enumerate(word_ids):
        if word is not None:
            places.setdefault(word, place)
    return places


# -- preparing -------------------------------------------------------------------------------------------------------


def _tags_by_row(dataset: Dataset) -> Iterator[tuple[int, str]]:
    for first, part in usable_rows.lists(dataset, "tags"):
        yield from ((row, tag) for row, tags in enumerate(part, first) for tag in tags)


def _tags(dataset: Dataset) -> set[str]:
    return {tag for _, part in usable_rows.lists(dataset, "tags") for tags in part for tag in tags}


def _text_of(tag: Any) -> str:
    """A tag as text; whole numbers beside missing ones are stored as 1.0."""
    return str(int(tag) if isinstance(tag, float) else tag)


def _nothing(value: Any, names: list[str] | None = None) -> bool:
    """Whether a word or tag is missing (None, blank, or -1 with named tags)."""
    return value is None or not str(value).strip() or (names is not None and value == -1)
