"""Embeddings: the loss by its formula, who is told apart from whom, scores that need all of a split, and the export."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import Run, RunError
from lockstep.data import text_pairs
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.plain.examples import Plain
from lockstep.plain.losses import batch_loss
from lockstep.proof import against_plain
from lockstep.tasks.embedding import Embedding
from lockstep.tasks.models import pooling, retrieval
from lockstep.tasks.objectives import objective
from lockstep.training.plain_sides import with_defaults
from support.messages import raises
from support.task_runs import make, write

SCORED = "task={name: embedding, anchor: anchor, positive: negative, score: score, score_range: [0, 5]}"
PAIRS = "task={name: embedding}"
CPU = torch.device("cpu")


def task_of(run: Run) -> Embedding:
    return Embedding(run).opened(Job.of(run).with_data().data)


def rows_in(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pairs" / f"{split}.jsonl").read_text().splitlines()]


class Output:
    """The part of a model's output that `loss_sum` reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def units(count: int, seed: int = 0, width: int = 5) -> torch.Tensor:
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=-1)


def by_hand(vectors: torch.Tensor, sides: int, allowed: Any, scale: float = 20.0) -> float:
    """The sum of -log of each positive's share of the softmax over what it is compared with."""
    count = len(vectors) // sides
    total = 0.0
    for i in range(count):
        cosines = {j: float(vectors[i] @ vectors[count + j]) for j in range((sides - 1) * count) if allowed(i, j)}
        total -= scale * cosines[i] - math.log(sum(math.exp(scale * c) for c in cosines.values()))
    return total


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negative", ["", ", negative: negative"])
@pytest.mark.parametrize("negatives", [None, 2])
def test_the_loss_is_the_formula(negative: str, negatives: int | None, tmp_path: Path) -> None:
    limit = f", negatives: {negatives}" if negatives else ""
    task = task_of(make(tmp_path, "pairs", f"task={{name: embedding{negative}{limit}}}"))
    sides = 3 if negative else 2
    batch = task.collate(task.splits["train"], np.arange(5), 0)
    vectors = units(sides * 5)
    within = negatives or 5
    found = float(task.loss_sum(Output(vectors), batch.targets))
    assert found == pytest.approx(by_hand(vectors, sides, lambda i, j: (j - i) % 5 <= within), rel=1e-5)
    assert task.count_targets(task.splits["train"], np.arange(5)) == int((batch.targets >= 0).sum()) == 5


def test_equal_texts_are_not_negatives(tmp_path: Path) -> None:
    """A text in two rows, and another text of the same anchor, are not negatives."""
    told = [("a", "x"), ("b", "x"), ("a", "y"), ("c", "z"), ("d", "c")]
    for split in ("train", "validation"):
        (tmp_path / "pairs").mkdir(exist_ok=True)
        write(tmp_path / "pairs" / f"{split}.jsonl", [{"anchor": a, "positive": p} for a, p in told])
    task = task_of(make(tmp_path, "pairs", PAIRS, "batch_size=5", "micro_batches=2"))
    batch = task.collate(task.splits["train"], np.arange(5), 0)
    hidden = task._not_compared(batch.targets, 5)
    assert {(i, j) for i, j in hidden.nonzero().tolist()} == {(0, 1), (1, 0), (0, 2), (2, 0), (3, 4)}
    vectors = units(10)
    wanted = by_hand(vectors, 2, lambda i, j: not bool(hidden[i, j]))
    assert float(task.loss_sum(Output(vectors), batch.targets)) == pytest.approx(wanted, rel=1e-5)


def test_scored_pairs_learn_their_scores(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", SCORED))
    batch = task.collate(task.splits["train"], np.arange(6), 0)
    vectors = units(12)
    scores = torch.tensor([row["score"] / 5 for row in rows_in(tmp_path)[:6]])
    wanted = ((vectors[:6] * vectors[6:]).sum(1) - scores).square().sum()
    assert float(task.loss_sum(Output(vectors), batch.targets)) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("task_keys", [PAIRS, SCORED, "task={name: embedding, negative: negative}"])
def test_a_blank_micro_batch_has_no_loss_and_no_gradient(task_keys: str, tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", task_keys))
    whole = task.collate(task.splits["train"], np.arange(4), 0)
    for batch in (task.collate(task.splits["train"], np.arange(0), 0), whole.blank()):
        assert (batch.targets == IGNORED).all()
        vectors = units(len(batch.targets)).requires_grad_()
        loss = task.loss_sum(Output(vectors), batch.targets)
        loss.backward()
        assert loss.item() == 0.0
        assert not vectors.grad.any()  # type: ignore[union-attr]


# -- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [22, 21, 9, 4, 2, 1])
def test_rows_are_grouped_at_random_and_none_is_alone(rows: int, tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", PAIRS))  # 22 rows a step, 8 micro-batches
    groups = task.split_micro_batches(task.splits["train"], np.arange(rows))
    assert len(groups) == 8
    assert np.concatenate(groups).tolist() == list(range(rows))  # as they came
    sizes = [len(group) for group in groups if len(group)]
    assert max(sizes) <= 3
    assert min(sizes) >= min(2, rows)


def test_no_pair_of_a_last_step_is_alone(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", PAIRS, "batch_size=6", "micro_batches=3", count=19))
    assert [len(g) for g in task.split_micro_batches(task.splits["train"], np.arange(3))] == [3, 0, 0]
    assert any("single one of the 19 pairs" in each for each in task.warnings)
    for key, *more in (("batch_size", "batch_size=1", "micro_batches=1"), ("task.positive", "data.limit=1")):
        run = make(tmp_path, "pairs", PAIRS, *more)
        with raises("LS3026", key):
            Embedding(run).check_prepared(Job.of(run).with_data().data)


def test_micro_batches_without_negatives_are_refused_before_reading(tmp_path: Path) -> None:
    with raises("LS1119", "batch_size", "8"):
        make(tmp_path, "pairs", PAIRS, "batch_size=8")
    make(tmp_path, "pairs", "task={name: embedding, negative: negative}", "batch_size=8")  # each has its own


# -- scores ----------------------------------------------------------------------------------------------------------


def test_ranks_recall_and_gain_by_hand() -> None:
    """Three texts; the first query has two right ones, at ranks 0 and 2; the second one, at rank 1."""
    asked = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    query, at = retrieval.ranks(asked, found, np.array([7, 7, 9]), np.array([1, 2, 3]))
    assert query.tolist() == [0, 0, 1]
    assert at.tolist() == [0, 2, 1]
    scores = retrieval.scores(query, at)
    assert scores["recall_at_1"] == pytest.approx((0.5 + 0.0) / 2)
    assert scores["recall_at_5"] == 1.0
    assert scores["mrr_at_10"] == pytest.approx((1.0 + 0.5) / 2)
    first = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    assert scores["ndcg_at_10"] == pytest.approx((first + 1 / math.log2(3)) / 2)


def test_equal_values_have_the_mean_of_their_places() -> None:
    assert objective.average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    one, other = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    assert objective.spearman(one, other) == pytest.approx(1.0)
    assert objective.pearson(one, other) == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert math.isnan(objective.pearson(one, np.ones(4)))
    assert math.isnan(objective.spearman(np.array([1.0, np.nan, 3.0, 4.0]), other))


def test_vectors_that_are_no_numbers_find_nothing() -> None:
    """No cosine exceeds NaN, so every correct text would rank first."""
    vectors, numbers = retrieval.dummy_predictions((6, 2, 4))
    gathered = {"anchors": vectors[:, 0], "positives": vectors[:, 1], "queries": numbers[:, 0], "texts": numbers[:, 1]}
    assert all(0 <= value <= 1 for value in retrieval.scores_of(gathered).values())
    for name in ("anchors", "positives"):
        broken = gathered | {name: np.where(np.arange(6)[:, None] == 2, np.nan, gathered[name])}
        assert all(math.isnan(value) for value in retrieval.scores_of(broken).values())


def scores_in_batches(task: Embedding, size: int) -> dict[str, float]:
    """The scores of a split, summed over batches of `size` rows as in an evaluation."""
    model = task.model().eval()
    columns = task.splits["validation"]
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for start in range(0, len(columns) + size, size):  # the last one is blank
            rows = np.arange(start, min(start + size, len(columns))) if start < len(columns) else np.arange(0)
            batch = task.collate(columns, rows, 0)
            for name, value in task.score_at(lambda inputs: model(**inputs).logits, batch, columns, rows).items():
                value = torch.round(value.double() * 2**20) / 2**20
                sums[name] = sums[name] + value if name in sums else value
    assert int(sums["examples"]) == len(columns)
    json.dumps(task.tables(sums))
    return task.metrics(sums)


@pytest.mark.parametrize("task_keys", [PAIRS, SCORED, "task={name: embedding, negative: negative}"])
def test_scores_of_a_split_do_not_depend_on_its_batches(task_keys: str, tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", task_keys))
    whole, parts = scores_in_batches(task, 15), scores_in_batches(task, 4)
    compared = set(whole) - {"loss"} if task.options.score is None else set(whole)  # of 4 rows, or of 15
    assert compared >= ({"recall_at_1", "ndcg_at_10"} if task.options.score is None else {"spearman", "pearson"})
    for name in compared:
        assert parts[name] == pytest.approx(whole[name], abs=1e-6)


def test_recall_searches_a_sample_of_a_large_split(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", "task={name: embedding, corpus: 4}"))
    assert task.slots == 4
    assert scores_in_batches(task, 4)["recall_at_5"] == 1.0


@pytest.mark.extras
def test_metrics_equal_those_of_sentence_transformers_on_the_export(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
        InformationRetrievalEvaluator,
        TripletEvaluator,
    )

    rows: list[dict[str, Any]] = []
    for keys in ("task={name: embedding, negative: negative}", SCORED):
        task = task_of(make(tmp_path, "pairs", keys))
        rows = rows or rows_in(tmp_path, "validation")
        folder = tmp_path / ("scored" if keys == SCORED else "told apart")
        folder.mkdir(exist_ok=True)
        task.write(folder, task.model().state_dict())
        model = library.SentenceTransformer(str(folder), device="cpu")
        ours = scores_in_batches(task, 4)
        if "spearman" in ours:
            columns = [[row[name] for row in rows] for name in ("anchor", "negative", "score")]
            theirs = EmbeddingSimilarityEvaluator(*columns)(model)
            assert ours["spearman"] == pytest.approx(theirs["spearman_cosine"], abs=1e-5)
            assert ours["pearson"] == pytest.approx(theirs["pearson_cosine"], abs=1e-5)
            continue
        texts = {row["positive"]: f"d{i}" for i, row in enumerate(rows)}
        asked = {row["anchor"]: f"q{i}" for i, row in enumerate(rows)}
        right: dict[str, set[str]] = {}
        for row in rows:
            right.setdefault(asked[row["anchor"]], set()).add(texts[row["positive"]])
        theirs = InformationRetrievalEvaluator(
            {name: text for text, name in asked.items()}, {name: text for text, name in texts.items()}, right
        )(model)
        for name in ("recall_at_1", "recall_at_5", "mrr_at_10", "ndcg_at_10"):
            assert ours[name] == pytest.approx(theirs[f"cosine_{name.replace('_at_', '@')}"], abs=1e-6), name
        columns = [[row[name] for row in rows] for name in ("anchor", "positive", "negative")]
        assert ours["triplet_accuracy"] == pytest.approx(TripletEvaluator(*columns)(model)["cosine_accuracy"])


@pytest.mark.extras
def test_the_loss_equals_that_of_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss

    for keys, loss in (("task={name: embedding, negative: negative}", MultipleNegativesRankingLoss), (SCORED, None)):
        task = task_of(make(tmp_path, "pairs", keys))
        rows = rows_in(tmp_path)[:6]
        folder = tmp_path / "export"
        folder.mkdir(exist_ok=True)
        task.write(folder, task.model().state_dict())
        model = library.SentenceTransformer(str(folder), device="cpu").eval()
        names = list(task.options.text_columns.values())
        read = [model.tokenize([row[name] for row in rows]) for name in names]
        batch = task.collate(task.splits["train"], np.arange(6), 0)
        with torch.no_grad():
            ours = float(task.loss_sum(task.model().eval()(**batch.inputs), batch.targets)) / 6
            made = (loss or CosineSimilarityLoss)(model)
            theirs = float(made(read, torch.tensor([row["score"] / 5 for row in rows])))
            formula, called = (plain_loss(task, model[0].auto_model, rows, libraries) for libraries in (False, True))
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert (formula, called) == (pytest.approx(theirs, rel=1e-6),) * 2


def plain_loss(task: Embedding, model: Any, rows: list[dict[str, Any]], libraries: bool) -> float:
    """The mean loss of rows by `lockstep.plain`: by its formula, or by sentence-transformers' function."""
    job = Plain(with_defaults(task), task.prepared.tokenizer, {"train": rows})
    job.libraries = libraries
    total, count = batch_loss(job, model.eval(), job.encode(rows))
    return float(total) / count


@pytest.mark.extras
@pytest.mark.parametrize("keys", ["{}", "{negative: negative}", "{negatives: 2}", "{similarity_scale: 5.0}"])
def test_the_plain_loss_by_sentence_transformers_leaves_out_what_the_formula_does(keys: str, tmp_path: Path) -> None:
    """Texts that stand in several rows, and other rows than the next ones, have no similarity in theirs."""
    pytest.importorskip("sentence_transformers")
    task = task_of(make(tmp_path, "pairs", f"task={{name: embedding, {keys[1:]}"))
    rows = rows_in(tmp_path)[:7]
    rows[3] = rows[3] | {"anchor": rows[0]["anchor"]}
    rows[5] = rows[5] | {"positive": rows[1]["positive"]}
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        formula, called = (plain_loss(task, model, rows, libraries) for libraries in (False, True))
        apart = [row | {"anchor": f"{place} {row['anchor']}"} for place, row in enumerate(rows)]
        assert called == pytest.approx(formula, rel=1e-5)
        assert plain_loss(task, model, apart, True) != pytest.approx(called, rel=1e-3)


@pytest.mark.extras
def test_verify_calls_the_loss_of_sentence_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    run = make(tmp_path, "pairs", "data.padding=batch")
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    right = MultipleNegativesRankingLoss.compute_loss_from_embeddings
    monkeypatch.setattr(
        MultipleNegativesRankingLoss, "compute_loss_from_embeddings", lambda self, *given: 1.001 * right(self, *given)
    )
    assert against_plain.train_beside_plain(run).differences


# -- data ------------------------------------------------------------------------------------------------------------


def test_a_row_s_texts_are_laid_side_by_side(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", "task={name: embedding, negative: negative}"))
    inputs, _ = text_pairs.inputs_of(task.splits["train"], np.array([3, 0]), int(task.tokenizer.pad_token_id))
    rows = rows_in(tmp_path)
    wanted = [rows[i][name] for name in ("anchor", "positive", "negative") for i in (3, 0)]
    read = task.tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True)
    assert [" ".join(text.split()) for text in read] == [
        " ".join(task.tokenizer.decode(task.tokenizer(text)["input_ids"], skip_special_tokens=True).split())
        for text in wanted
    ]
    assert inputs["attention_mask"].sum(1).tolist() == [len(task.tokenizer(text)["input_ids"]) for text in wanted]


BAD = {
    "no such column": (["task={name: embedding, anchor: question}"], ["task.anchor", "'question'", "it has anchor"]),
    "twice the same column": (["task={name: embedding, positive: anchor}"], ["must be different columns"]),
    "a scale and a score": (
        ["task={name: embedding, score: score, similarity_scale: 5}"],
        ["similarity_scale", "LS3024"],
    ),
    "a range without a score": (["task={name: embedding, score_range: [0, 5]}"], ["score_range", "LS3024"]),
    "a score and negatives": (["task={name: embedding, score: score, negatives: 3}"], ["remove task.negative"]),
    "scores beyond": (["task={name: embedding, score: score}"], ["task.score: row", "task.score_range=[0,5]"]),
    "words for scores": (
        ["task={name: embedding, score: negative}"],
        ["task.score: row 0", "not a number from 0 to 1"],
    ),
    "an encoder and decoder": (["model={type: t5}"], ["an encoder or a decoder"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_message(case: str, tmp_path: Path) -> None:
    overrides, wanted = BAD[case]
    with pytest.raises(RunError) as caught:
        task_of(make(tmp_path, "pairs", *overrides))
    for part in wanted:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"anchor": "a b", "positive": " ", "negative": "c"}, ("LS2323", "task.positive", "'positive'")),
        (
            {"anchor": "a b", "positive": "c  d", "negative": "c d"},
            ("LS2291", "task.negative", "1", "9", "task.positive"),
        ),
    ],
)
def test_bad_rows_are_refused(row: dict[str, str], wanted: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    good = [{"anchor": f"a {i}", "positive": f"b {i}", "negative": f"c {i}"} for i in range(8)]
    write(tmp_path / "pairs" / "train.jsonl", [*good, row])
    with raises(*wanted):
        task_of(make(tmp_path, "pairs"))


# -- models ----------------------------------------------------------------------------------------------------------


def test_pooling_looks_at_real_tokens_only() -> None:
    hidden = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [9.0, 9.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    raw = {
        "mean": [[1.5, 3.0], [2 / 3, 2 / 3]],
        "cls": [[3.0, 4.0], [1.0, 0.0]],
        "last_token": [[0.0, 2.0], [1.0, 1.0]],
    }
    for how, wanted in raw.items():
        found = pooling.pooled(hidden, mask, how)
        assert torch.allclose(found, torch.nn.functional.normalize(torch.tensor(wanted), dim=-1))


@pytest.mark.parametrize("how", list(pooling.MODES))
def test_pooling_of_an_export_is_read_and_kept(how: str, tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "pairs", "task={name: embedding}", f"task.pooling={how}"))
    task.write(tmp_path, task.model().state_dict())
    assert pooling.of_folder(tmp_path) == how
    again = make(tmp_path, "pairs", PAIRS, f"model={{source: {tmp_path}}}", "tokenizer={}")
    assert task_of(again).prepared.facts["pooling"] == how
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with raises("LS3160", "pooling_mode_max_tokens"):
        task_of(again)


@pytest.mark.processes
def test_training_raises_similarity_of_pairs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = ("launch.processes=1", "strategy.name=single", "steps=40", "batch_size=32", "micro_batches=2")
    run = make(tmp_path, "pairs", PAIRS, *one, "evaluate.every=10", count=160)
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (line for line in lines if line["split"] == "validation")
    assert last["loss"] < first["loss"]
    assert {"recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "ndcg_at_10"} <= set(last)
    samples = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[-1])["samples"]
    assert all(list(sample) == ["text", "nearest", "cosine", "right"] for sample in samples)
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.search(r'id="predictions">.*validation.*recall.*texts looked at', page, re.DOTALL)
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), "the dog runs .", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["embedding"]
    assert len(found) == 32
    assert sum(value * value for value in found) == pytest.approx(1.0, abs=1e-5)
    assert main(["evaluate", str(tmp_path / "out"), "--split", "validation"]) == 0
    assert f"{last['recall_at_5']:.3g}" in capfd.readouterr().out
