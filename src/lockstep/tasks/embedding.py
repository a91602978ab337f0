"""Embeddings: a unit vector per text, close to those of matching texts, with any model of `AutoModel`.

In: pairs of related texts, optionally with unrelated ones (negatives); or pairs with a similarity score. Out: the loss,
and recall, reciprocal rank and nDCG among all texts of a split, or correlations with the scores. The export is in the
format of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.run import RunError
from lockstep.config.sections import Section
from lockstep.data import splitting, text_pairs, tokenizer
from lockstep.data.arrow_cache import Columns, Prepared, examples_in
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.column_types import Kind
from lockstep.data.order import by_chance, total_steps
from lockstep.data.token_checks import Limit
from lockstep.tasks.models import heads, pooling, retrieval
from lockstep.tasks.objectives import objective
from lockstep.tasks.task import Forward, Generate, GivesPredictions, Predicts, spread_rows
from lockstep.tasks.text_task import Arrays, TextData, TextTask

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

_AMONG = 64  # texts among which a sample's nearest one is searched
_SCORED = 100_000  # maximum number of scored pairs for correlations


class EmbeddingOptions(Section):
    """The task's own keys in the run file."""

    anchor: str = Field("anchor", description="column of the query text, such as a question")
    positive: str = Field("positive", description="column of the matching text")
    negative: str | list[str] | None = Field(
        None,
        description="column, or several, of texts that do not match (hard negatives); default: only other rows' texts",
    )
    score: str | None = Field(None, description="column of similarity scores, which are learned instead of a ranking")
    score_range: tuple[float, float] = Field((0.0, 1.0), description="scores of the least and the most similar texts")
    similarity_scale: float = Field(
        20.0, gt=0, description="factor of the cosines before their softmax (inverse temperature)"
    )
    negatives: int | None = Field(
        None, ge=1, description="maximum number of other rows in a micro-batch used as negatives; default: all"
    )
    pooling: Literal["mean", "cls", "last_token"] | None = Field(
        None, description="hidden states that form the vector; default: the model's own pooling, else mean"
    )
    corpus: int = Field(
        5000, ge=2, description="maximum number of texts of a split that recall searches, evenly spaced"
    )
    samples: int = Field(3, ge=0, description="texts shown after each evaluation, with the nearest other text")

    @model_validator(mode="after")
    def _one_kind(self) -> EmbeddingOptions:
        if self.score is not None and (self.negative is not None or self.negatives is not None):
            raise InvalidValue(
                "LS3020", "score rates pairs of texts, so negative cannot be used with it; remove task.negative"
            )
        for key, scored in (("similarity_scale", False), ("corpus", False), ("score_range", True)):
            if key in self.changed_keys and scored != (self.score is not None):
                raise InvalidValue("LS3024", f"{key} has no effect with{'out' * scored} score; remove task.{key}")
        if not self.score_range[0] < self.score_range[1]:
            raise InvalidValue("LS3021", "score_range: expected the lowest and the highest score, in this order")
        columns = list(self.text_columns.values())
        if len(set(columns)) < len(columns):
            raise InvalidValue("LS3022", "anchor, positive and negative must be different columns")
        return self

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> text column."""
        more = [self.negative] if isinstance(self.negative, str) else self.negative or []
        keys = ["task.negative"] if len(more) == 1 else [f"task.negative.{place}" for place in range(len(more))]
        both = {"task.anchor": self.anchor, "task.positive": self.positive}
        return both | dict(zip(keys, more, strict=True))


class Embedding(TextTask, Predicts, GivesPredictions):
    """One vector per text."""

    Options = EmbeddingOptions
    head = heads.EMBEDDING
    reads_token_types = True
    column_keys = ("anchor", "positive")
    input_keys = ("anchor",)
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "anchor": ("anchor", "query", "question", "sentence"),
        "positive": ("positive", "pos", "positive_passage"),
        "score": ("score", "similarity", "similarity_score", "relatedness", "relatedness_score"),
    }
    small_model = "bert"
    default_model = "sentence-transformers/all-MiniLM-L6-v2"
    cache_name = ("embedding",)
    in_batch_negatives = True
    row_is_example = True
    not_streamed_reason = "it compares all rows of train to find equal texts, so that none is a negative of itself"
    library, loader = "sentence-transformers", "SentenceTransformer"
    pipeline = "sentence-similarity"
    display_keys = ("corpus", "samples")
    metric_inputs = ("outputs",)
    metric_names = ("triplet_accuracy", "spearman", "pearson", *retrieval.NAMES)

    @property
    def usage(self) -> str:
        return (
            "from sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("PATH_OR_REPO")\nmodel.encode(["some text", "another text"])'
        )

    # -- before any process ------------------------------------------------------------------------------------------

    def resolved_pooling(self) -> str:
        """The pooling of the run file, else of the model's own files, else mean. Errors: `RunError`."""
        return self.options.pooling or pooling.of_source(self.run.model) or "mean"

    def plain_options(self) -> dict[str, Any]:
        return {"pooling": self.resolved_pooling()}

    def unsupported_keys(self) -> dict[str, str]:
        options = self.options
        alone = options.score is None and options.negative is None
        size, parts = self.run.batch_size, self.run.micro_batches
        if not alone or size == 1 or size >= 2 * parts:  # 1: a placeholder of `init`
            return {}
        default = "" if "micro_batches" in self.run.model_fields_set else " (the default of micro_batches)"
        return {
            "batch_size": f"{size} pairs in {parts} micro-batches{default} leave some "
            "micro-batches with a single pair, and a pair's negatives are the other pairs of its "
            f"micro-batch: raise batch_size to {2 * parts} or "
            f"more, or set micro_batches to {size // 2} or less"
        }

    def fingerprint(self) -> str:
        return self.resolved_pooling()

    @classmethod
    def columns_to_read(cls, options: EmbeddingOptions) -> dict[str, str]:
        return options.text_columns | ({} if options.score is None else {"task.score": options.score})

    @classmethod
    def read_as(cls, options: EmbeddingOptions) -> dict[str, Kind]:
        return super().read_as(options) | ({} if options.score is None else {options.score: "number"})

    @classmethod
    def valid_rows(cls, rows: Dataset, options: EmbeddingOptions, split: str, name: str, drop: bool) -> Dataset:
        return text_pairs.whole(rows, options.text_columns, options.score, options.score_range, split, name, drop)

    @classmethod
    def has_unusable_rows(cls, options: EmbeddingOptions) -> bool:
        return options.negative is not None

    @classmethod
    def learnable(cls, rows: Dataset, options: EmbeddingOptions, split: str, name: str, drop: bool) -> Dataset:
        """Rows whose negatives differ from their own texts. Without `drop` all rows: `encode_split` checks them."""
        return text_pairs.without_own_negatives(rows, list(options.text_columns.values())) if drop else rows

    @classmethod
    def dedup_columns(cls, options: EmbeddingOptions) -> tuple[list[str], list[str]]:
        return list(options.text_columns.values()), [] if options.score is None else [options.score]

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        from lockstep.tasks.models import model_configs

        if model_configs.load_config(self.run.model).is_encoder_decoder:
            raise RunError(
                "LS3023",
                "model: embeddings need an encoder or a decoder, and this model is an encoder-decoder; choose "
                "another model",
            )
        super().check(data, folder, tok)

    def check_prepared(self, prepared: Prepared) -> None:
        super().check_prepared(prepared)
        if self.options.score is not None or self.options.negative is not None:
            return
        one, more = "", ""
        if self.run.batch_size == 1:
            one, more = "batch_size: 1 is one pair a step", "raise it"
        elif examples_in(prepared.splits["train"]) == 1:
            one, more = "task.positive: train has one pair", "give more pairs"
        if one:
            raise RunError(
                "LS3026",
                f"{one}, and a pair's negatives are the other pairs of its micro-batch, so its loss is always 0; "
                f"{more}, or set task.negative",
            )

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, Limit]:
        limit = super().limits(read_by)["input_ids"]
        return {"input_ids": replace(limit, sequences=len(self.options.text_columns))}

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        options = self.options
        return [self.run.data.max_length, [list(options.text_columns.values()), options.score, options.score_range]]

    def encode_split(self, data: TextData, split: str, folder: Path, tok: Any, key: str) -> tuple[str, list[int]]:
        rows, options, texts = data.splits[split], self.options, list(self.options.text_columns.values())
        numbers = retrieval.numbered([splitting.hashes(rows, [column]) for column in texts])
        text_pairs.refuse_own_negatives(rows, options.text_columns, numbers, split, data.name)
        score, most = (options.score, options.score_range), self.run.data.max_length
        return text_pairs.encoded(rows, texts, np.stack(numbers, 1), *score, tok, most, key), []

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        return {"pooling": self.resolved_pooling()}

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.texts = len(self.options.text_columns)
        self.slots = max(len(columns) for split, columns in self.splits.items() if split != "train")
        if self.options.score is None:
            self.slots = min(self.slots, self.options.corpus)
        else:  # at least the few train examples used to verify the export
            self.slots = min(max(self.slots, 3), _SCORED)

    @property
    def summary_lines(self) -> dict[str, str]:
        if self.options.score is not None:
            return {}
        rows = -(-self.run.batch_size // self.run.micro_batches) - 1
        rows = min(rows, self.options.negatives or rows)
        return {"negatives": f"{rows} other rows of the micro-batch per row, {self.texts - 2} of its own"}

    @property
    def warnings(self) -> list[str]:
        """Warnings, also about a step of a single pair."""
        run, examples = self.run, len(self.splits["train"])
        whole, rest = divmod(examples, run.batch_size)
        reached = total_steps(run.epochs, run.steps, whole + 1) > whole
        if rest != 1 or not reached or self.texts > 2 or self.options.score is not None:
            return super().warnings
        text = (
            f"batch_size: the last step of an epoch has a single one of the {examples:,} pairs, without another to "
            "be compared with, so its loss is 0; choose another batch_size, or leave out a pair"
        )
        return [*super().warnings, text]

    def model(self, empty: bool = False) -> nn.Module:
        return pooling.install(super().model(empty), self.prepared.facts["pooling"])

    def split_micro_batches(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Split rows into micro-batches at random rather than by length, as in-batch negatives require, with equal
        sizes.

        In the last step of an epoch no row is alone unless it has the step to itself: the last micro-batches are empty
        instead. A row with negatives of its own may be alone."""
        if self.options.score is not None:
            return super().split_micro_batches(columns, rows)
        each = -(-self.run.batch_size // self.run.micro_batches)
        filled = min(self.run.micro_batches, -(-len(rows) // each))
        if self.texts == 2:
            filled = max(1, min(filled, len(rows) // 2))
        return by_chance(len(rows), filled) + [np.zeros(0, np.int64)] * (self.run.micro_batches - filled)

    def padded_lengths(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        return [self.texts * columns.flat("width")[rows]]

    def tensors(self, columns: Columns, rows: np.ndarray) -> Arrays:
        """All texts of the rows: anchors [B], then positives, then negatives. The target of an anchor is its score or
        text id; other texts have ids below `IGNORED`, which are not targets."""
        inputs, targets = text_pairs.inputs_of(columns, rows, int(self.tokenizer.pad_token_id))
        return self.with_types(inputs), targets

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return len(rows)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._losses(outputs.logits.float(), targets).sum()

    def _losses(self, vectors: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row, float32 [B]: cross-entropy of its positive among the texts of the micro-batch, by
        cosine times `similarity_scale` (Henderson et al. 2017, arXiv:1705.00652; sentence-transformers'
        MultipleNegativesRankingLoss), or the squared error of the cosine (its CosineSimilarityLoss)."""
        import torch
        from torch.nn.functional import cross_entropy

        if len(targets) % self.texts:  # a padding micro-batch, truncated from another
            return vectors.sum(1) * 0.0
        count = len(targets) // self.texts
        anchors, others = vectors[:count], vectors[count:]  # [B, H], [(texts - 1) B, H]
        real = (targets[:count] >= 0).float()
        if self.options.score is not None:
            true_scores = (targets[:count].double() / text_pairs.ONE).float()
            return ((anchors * others).sum(1) - true_scores).square() * real
        with torch.autocast(vectors.device.type, enabled=False):
            scores = self.options.similarity_scale * anchors @ others.T  # [B, (texts - 1) B]
        place = torch.arange(count, device=targets.device)
        scores = scores.masked_fill(self._not_compared(targets, count), -torch.inf)
        return cross_entropy(scores, place, reduction="none") * real

    def _not_compared(self, targets: Tensor, count: int) -> Tensor:
        """Mask of texts excluded from each row's negatives: bool [B, (texts - 1) B]. Excludes copies of the row's own
        two texts, positives of the same anchor, and texts beyond `negatives`."""
        import torch

        anchors, others = targets[:count], text_pairs.number(targets[count:])
        at = torch.arange(len(others), device=targets.device)
        away = (at[None] - at[:count, None]) % count  # distance in rows: [B, (texts - 1) B]
        same = (others[None] == others[:count, None]) | (others[None] == anchors[:, None])
        same |= (anchors[at % count][None] == anchors[:, None]) & (at < count)
        hidden = same & (at[None] != at[:count, None])
        return hidden if self.options.negatives is None else hidden | (away > self.options.negatives)

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        vectors = forward(batch.inputs).float()
        return self._sums(vectors, batch.targets)

    def _sums(self, vectors: Tensor, targets: Tensor) -> Sums:
        count = len(targets) // self.texts
        sums = {"loss": self._losses(vectors, targets).double().sum(), "examples": (targets >= 0).sum().double()}
        if self.texts > 2:
            parts = vectors.view(self.texts, count, -1)
            cosines = (parts[:1] * parts[1:]).sum(-1)  # [texts - 1, B]
            right = (cosines[:1] > cosines[1:]) & (targets[:count] >= 0)
            sums["nearer"] = right.double().sum()
        return sums

    def score_at(self, forward: Forward, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """The sums, and the values compared over the whole split, each row's in its own slot [slots]."""
        import torch

        vectors = forward(batch.inputs).float()
        count = len(batch.targets) // self.texts
        chosen = spread_rows(columns, min(self.slots, len(columns)))
        place = np.searchsorted(chosen, rows)
        used = np.flatnonzero(chosen[np.minimum(place, len(chosen) - 1)] == rows)  # among the rows of this batch
        slots, taken = (torch.from_numpy(each).to(vectors.device) for each in (place[used], used))

        def spread(values: Tensor) -> Tensor:
            out = torch.zeros(self.slots, *values.shape[1:], dtype=torch.float64, device=vectors.device)
            return out.index_copy_(0, slots, values[taken].double() * retrieval.SHARP)

        anchors, others = vectors[:count], vectors[count : 2 * count]
        ours, theirs = batch.targets[:count], text_pairs.number(batch.targets[count : 2 * count])
        results = {"there": spread(torch.ones_like(ours))}
        parts = vectors[: count * self.texts].view(self.texts, count, -1)
        gathered = (anchors * others).sum(1) if self.options.score is not None else parts.transpose(0, 1)
        results |= {"outputs": gathered} if self.per_example_outputs else {}  # float32 [B], or [B, texts, H]
        if self.options.score is not None:
            results |= {"cosines": spread((anchors * others).sum(1)), "scores": spread(ours.double() / text_pairs.ONE)}
        else:
            results |= {"anchors": spread(anchors), "positives": spread(others)}
            results |= {"queries": spread(ours), "texts": spread(theirs)}
        return self._sums(vectors, batch.targets) | results

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and score of each pair, float64 [N], from 0 to 1; or all vectors, float64 [N, texts, H], and text ids,
        int64 [N, texts], equal for equal texts."""
        answers = sums["outputs"].double().numpy()
        return answers, text_pairs.true_of(columns, rows)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        from lockstep.tasks.models import model_configs

        if self.options.score is not None:
            return np.array([0.9, -0.1, 0.4, 0.3]), np.array([1.0, 0.0, 0.5, 0.25])
        return retrieval.dummy_predictions((4, self.texts, int(model_configs.load_config(self.run.model).hidden_size)))

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = float(sums["examples"])
        scores = {"loss": float(sums["loss"]) / count}
        if "nearer" in sums:
            scores["triplet_accuracy"] = float(sums["nearer"]) / count / (self.texts - 2)
        gathered = _gathered(sums)
        if "cosines" in gathered:
            both = gathered["cosines"], gathered["scores"]
            scores |= {"spearman": objective.spearman(*both), "pearson": objective.pearson(*both)}
        elif "anchors" in gathered:
            scores |= retrieval.scores_of(gathered)
        return scores

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Plot of recall@k; or of the mean cosine of pairs by score."""
        gathered = {} if np.isnan(float(sums["loss"])) else _gathered(sums)
        if "anchors" in gathered:
            query, at = retrieval.ranks_of(gathered)
            within = [k for k in retrieval.CURVE if k <= len(np.unique(gathered["texts"]))]
            line = [[k, retrieval.recall(query, at, k)] for k in within]
            return {"plots": [{"title": "recall", "x": "texts looked at", "lines": {"recall": line}}]}
        if "cosines" in gathered:
            tenths = np.minimum((10 * gathered["scores"]).astype(int), 9)
            line = [[(t + 0.5) / 10, float(gathered["cosines"][tenths == t].mean())] for t in np.unique(tenths)]
            return {"plots": [{"title": "mean cosine", "x": "score", "lines": {"cosine": line}}]}
        return {}

    def samples(self, generate: Generate, forward: Forward) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        rows = spread_rows(columns, max(_AMONG, self.options.samples))
        if self.options.samples == 0:
            return []
        batch = self.collate(columns, rows, 0)
        vectors, texts = forward(batch.inputs).float().cpu(), self.decoded(batch.inputs["input_ids"])
        count = len(rows)
        cosines = vectors[:count] @ vectors[count : 2 * count].T  # [B, B]
        sampled = np.unique(np.linspace(0, count - 1, self.options.samples).astype(int)).tolist()
        if self.options.score is not None:
            true_scores = (batch.targets[:count].double() / text_pairs.ONE).tolist()
            return [
                {"text": texts[i], "other": texts[count + i], "cosine": f"{float(cosines[i, i]):.3f}"}
                | {"score": f"{true_scores[i]:.3f}"}
                for i in sampled
            ]
        near = cosines.argmax(1).tolist()
        return [
            {"text": texts[i], "nearest": texts[count + near[i]], "cosine": f"{float(cosines[i, near[i]]):.3f}"}
            | {"right": texts[count + i]}
            for i in sampled
        ]

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield the `embedding`: a unit vector as a list of numbers."""
        import torch

        from lockstep.tasks.models import inference, models

        model, tok = models.exported(self.head, folder, self.run.model)
        how = pooling.of_folder(folder)
        listed = "token_type_ids" in tok.model_input_names and models.takes_types(model.config, self.head, True)
        typed = tokenizer.TokenTypes.of(tok) if listed else None

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            tokens = text_pairs.read(tok, [row[0] for row in rows], self.run.data.max_length)
            batch = inference.padded([{"input_ids": ids} for ids in tokens], {"input_ids": int(tok.pad_token_id)})
            if typed is not None:
                batch["token_type_ids"] = torch.from_numpy(typed.padded(batch["attention_mask"].numpy()))
            vectors = pooling.pooled(model(**batch).last_hidden_state, batch["attention_mask"], how)
            return [{"embedding": vector} for vector in vectors.tolist()]

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        numbers = answer["embedding"]
        return f"{' '.join(f'{number:+.4f}' for number in numbers[:6])} ... ({len(numbers)} numbers)  {row[0]}"

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import model_configs

        super().write(folder, weights)
        size = model_configs.load_config(self.run.model).hidden_size
        pooling.write(folder, self.prepared.facts["pooling"], size, self.run.data.max_length)


def _gathered(sums: Sums) -> dict[str, np.ndarray]:
    """The gathered values of the slots in use."""
    if "there" not in sums:
        return {}
    used = sums["there"].numpy() > 0
    names = ("cosines", "scores", "anchors", "positives", "queries", "texts")
    return {name: sums[name].numpy()[used] / retrieval.SHARP for name in names if name in sums}
