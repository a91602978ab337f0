"""Embeddings beside sentence-transformers: translations as pairs, and pairs with a score; both models are scored by its
evaluators.

In: the data folder, a folder with MiniLM. Out: scores of the test split before and after, of both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import texts
from sides import Recipe, ours, settings

PAIRS = Recipe(rows=1024, batch=64, rate=2e-4, micro_batches=2)
SCORED = Recipe(rows=768, batch=32, rate=5e-5, micro_batches=2)
WANTED = {"recall@1": "cosine_recall@1", "recall@10": "cosine_recall@10", "ndcg@10": "cosine_ndcg@10"}


def found_by(path: Path | str, rows: list[dict]) -> dict[str, float]:
    """An English caption shall find its German one among all."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

    asked, corpus = ({str(i): row[side] for i, row in enumerate(rows)} for side in ("en", "de"))
    evaluator = InformationRetrievalEvaluator(asked, corpus, {i: {i} for i in asked}, batch_size=64, write_csv=False)
    told = evaluator(SentenceTransformer(str(path), device="cpu"))
    return {name: float(told[theirs]) for name, theirs in WANTED.items()}


def nearness(path: Path | str, rows: list[dict]) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    evaluator = EmbeddingSimilarityEvaluator(
        [r["first"] for r in rows], [r["second"] for r in rows], [r["score"] for r in rows], write_csv=False
    )
    told = evaluator(SentenceTransformer(str(path), device="cpu"))
    return {"spearman": float(told["spearman_cosine"]), "pearson": float(told["pearson_cosine"])}


def theirs(model: Path, rows: list[dict], room: Path, recipe: Recipe, seed: int, scored: bool) -> Path:
    """sentence-transformers' trainer; of pairs as many meet as in a micro-batch of lockstep's."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    learned = SentenceTransformer(str(model), device="cpu")
    learned.max_seq_length = recipe.length
    columns = ["first", "second", "score"] if scored else ["en", "de"]
    loss: Any = (
        losses.CosineSimilarityLoss(learned) if scored else losses.MultipleNegativesRankingLoss(learned, scale=20)
    )
    accumulate = 1 if scored else recipe.micro_batches
    arguments = SentenceTransformerTrainingArguments(**settings(room, recipe, seed, accumulate))
    data = Dataset.from_list(rows).select_columns(columns)
    SentenceTransformerTrainer(learned, arguments, train_dataset=data, loss=loss).train()
    learned.save_pretrained(str(room / "model"))
    return room / "model"


def compared(data: Path, model: Path, room: Path, seed: int, scored: bool) -> dict[str, Any]:
    recipe, score = (SCORED, nearness) if scored else (PAIRS, found_by)
    made = texts.alike if scored else texts.translations
    folder = made(data, room / "data", recipe.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    names = (
        {"anchor": "first", "positive": "second", "score": "score"} if scored else {"anchor": "en", "positive": "de"}
    )
    mine = ours(room / "ours", recipe, seed, {"name": "embedding", **names}, {"source": str(model)}, folder)
    others = theirs(model, train, room / "theirs", recipe, seed, scored)
    return {
        "before": score(model, test),
        "lockstep": score(mine["export"], test),
        "sentence-transformers": score(others, test),
        "lockstep, as it says": {k: v for k, v in mine["scores"].items() if isinstance(v, float)},
    }


RECIPES = {
    "retrieval": lambda data, model, room, seed: compared(data, model, room, seed, scored=False),
    "similarity": lambda data, model, room, seed: compared(data, model, room, seed, scored=True),
}
