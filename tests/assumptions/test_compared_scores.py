"""Assumptions of the plain reference about libraries that define metrics and losses: scikit-learn, SciPy, seqeval,
torchmetrics, rouge-score, sentence-transformers and TRL."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from support.assumed import rests_on_it

pytestmark = pytest.mark.extras


@rests_on_it("src/lockstep/plain/scores.py")
def test_f1_averages_and_correlations() -> None:
    """scikit-learn's macro F1 is the mean over classes that occur among labels or predictions; a class without a
    correct prediction counts as 0. average_precision_score, r2_score and the error metrics are means over columns.
    SciPy's correlation functions return the coefficient first."""
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    assert metrics.f1_score([0, 0, 1], [0, 0, 2], average="macro") == pytest.approx(1 / 3)
    true, scores = np.array([[1, 0], [0, 1], [1, 1]]), np.array([[0.9, 0.8], [0.1, 0.7], [0.3, 0.2]])
    columns = [metrics.average_precision_score(true[:, c], scores[:, c]) for c in (0, 1)]
    assert metrics.average_precision_score(true, scores) == pytest.approx(sum(columns) / 2)
    assert metrics.mean_squared_error(true, scores) == pytest.approx(((true - scores) ** 2).mean())
    assert metrics.r2_score(true, scores) == pytest.approx(
        np.mean([metrics.r2_score(true[:, c], scores[:, c]) for c in (0, 1)])
    )
    line = np.arange(4.0)
    assert [stats.pearsonr(line, -line)[0], stats.spearmanr(line, line**3)[0]] == pytest.approx([-1, 1])


@rests_on_it("src/lockstep/plain/scores.py")
def test_seqeval_counts_whole_entities() -> None:
    """seqeval's precision, recall and F1 are micro averages over entities; an I- tag of another type begins an entity;
    zero_division=0 gives 0 without entities."""
    seqeval = pytest.importorskip("seqeval.metrics")
    true, predicted = [["B-A", "I-A", "O"], ["B-B"]], [["B-A", "I-B", "O"], ["B-B"]]
    of = (seqeval.precision_score, seqeval.recall_score, seqeval.f1_score)
    assert [score(true, predicted, zero_division=0) for score in of] == pytest.approx([1 / 3, 1 / 2, 2 / 5])
    assert seqeval.f1_score([["O"]], [["O"]], zero_division=0) == 0


@rests_on_it("src/lockstep/plain/scores.py")
def test_scales_of_squad_and_rouge() -> None:
    """torchmetrics' squad returns exact_match and f1 in percent, the best over each question's answers. rouge_score's
    fmeasure is between 0 and 1, without stemming by default."""
    rouge = pytest.importorskip("rouge_score.rouge_scorer")
    from torchmetrics.functional.text import squad

    guess = [{"id": "0", "prediction_text": "The red cat"}, {"id": "1", "prediction_text": ""}]
    answers = [["a dog", "red cat sat"], [""]]
    true = [{"id": str(n), "answers": {"text": some, "answer_start": []}} for n, some in enumerate(answers)]
    scores = squad(guess, true)
    assert {name: float(value) for name, value in scores.items()} == pytest.approx({"exact_match": 50.0, "f1": 90.0})
    result: Any = rouge.RougeScorer(("rouge1", "rouge2", "rougeL")).score("cats sat down", "a cats sat")
    assert [result[kind].fmeasure for kind in result] == pytest.approx([2 / 3, 1 / 2, 2 / 3])
    assert rouge.RougeScorer(("rouge1",)).score("cats", "cat")["rouge1"].fmeasure == 0


@rests_on_it("src/lockstep/plain/losses.py")
def test_losses_of_sentence_transformers() -> None:
    """compute_loss_from_embeddings takes a list of [B, H] tensors and labels. CosineSimilarityLoss is the mean squared
    error of the cosines. MultipleNegativesRankingLoss is the mean cross entropy of scale * similarity(anchors,
    candidates), where candidates are all positives, then all negatives, and the target is the anchor's own row."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    draw = torch.Generator().manual_seed(0)
    vectors = [torch.nn.functional.normalize(torch.randn(3, 4, generator=draw), dim=1) for _ in range(3)]
    scores, near = torch.tensor([0.0, 0.5, 1.0]), dict[str, Any](rel=1e-5)
    loss = losses.CosineSimilarityLoss(torch.nn.Identity()).compute_loss_from_embeddings(vectors[:2], scores)
    cosines = (vectors[0] * vectors[1]).sum(1)
    assert loss.item() == pytest.approx((cosines - scores).square().mean().item(), **near)
    ranking = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), 20.0, lambda a, b: a @ b.T)
    loss = ranking.compute_loss_from_embeddings(vectors, torch.arange(3))
    logits = 20 * vectors[0] @ torch.cat(vectors[1:]).T
    assert loss.item() == pytest.approx(cross_entropy(logits, torch.arange(3)).item(), **near)


@rests_on_it("src/lockstep/plain/losses.py")
def test_losses_of_trl() -> None:
    """RewardTrainer.compute_loss expects the logits of all chosen answers before the rejected ones, and adds
    center_rewards_coefficient times the mean squared sum of a pair. CPOTrainer.cpo_loss for SimPO is -logsigmoid(beta *
    (margin - gamma / beta)) per pair."""
    cpo, trl = pytest.importorskip("trl.experimental.cpo"), pytest.importorskip("trl")
    near = dict[str, Any](rel=1e-6)
    trainer: Any = cpo.CPOTrainer.__new__(cpo.CPOTrainer)
    shared = {"accelerator": SimpleNamespace(device="cpu"), "label_smoothing": 0.0, "alpha": 0.0}
    vars(trainer).update(shared, beta=2.0, loss_type="simpo", simpo_gamma=0.5)
    loss = trainer.cpo_loss(torch.tensor([-1.0]), torch.tensor([-1.5]))[0]
    assert loss.tolist() == pytest.approx([-torch.tensor(2 * 0.5 - 0.5).sigmoid().log().item()], **near)
    trainer = trl.RewardTrainer.__new__(trl.RewardTrainer)
    gather = {"gather": torch.Tensor.detach, "gather_for_metrics": torch.Tensor.detach}
    vars(trainer).update(
        args=SimpleNamespace(center_rewards_coefficient=0.1),
        accelerator=SimpleNamespace(device="cpu", **gather),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    rewards = torch.tensor([[1.0, 2.0], [0.5, 3.0]])  # chosen, rejected
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=rewards.reshape(-1, 1)), {})
    margins, sums = rewards[0] - rewards[1], rewards.sum(0)
    assert loss.item() == pytest.approx((-margins.sigmoid().log() + 0.1 * sums.square()).mean().item(), **near)
