"""Rounding in the plain reference: it sums the norm in float64, estimates rounding error from several perturbations,
and rounds to bfloat16 where the run does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lockstep.data.job import optimizer_class
from lockstep.plain import train
from lockstep.proof import against_plain
from lockstep.training.plain_sides import perturb_
from lockstep_trace import causes

SIZE, TINY = 64, 1e-25  # TINY squared underflows in float32


def test_the_norm_is_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gradient = nn.Linear(SIZE, SIZE, bias=False), torch.full((SIZE, SIZE), TINY)
    monkeypatch.setattr(train, "batch_loss", lambda job, model, examples: ((model.weight * gradient).sum(), 1.0))
    optim = {"name": "lion", "layerwise_lr_decay": 1.0, "learning_rate": 1.0, "min_lr_ratio": 0.0}
    optim |= {"schedule": [[0, 1.0]], "max_grad_norm": None}
    job: Any = SimpleNamespace(run={"precision": "fp32", "optim": optim})
    step = next(train.train_steps(job, model, [[[{}]]], 1, [0]))
    assert step.norm == pytest.approx(SIZE * TINY, rel=1e-6)
    assert float(torch.nn.utils.get_total_norm([gradient])) == 0  # control: a float32 sum loses it


def test_bfloat16_rounds_a_gradient_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh head gives equal logits and equal gradients. A 27th of them rounds differently from the whole, all in the
    same direction: over 64 units the norm is off by 0.2 % if the sum is divided after backward."""
    rows, labels = torch.ones(9, SIZE), torch.zeros(9, 3)

    def norm(divided: bool, low: bool = True) -> float:
        """Return a step's gradient norm in a torch loop, with the loss divided before backward or the gradient after
        it."""
        model = nn.Linear(SIZE, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        with torch.autocast("cpu", torch.bfloat16, low):
            loss = binary_cross_entropy_with_logits(model(rows).float(), labels, reduction="sum")
        (loss / 27 if divided else loss).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) / (1 if divided else 27)

    def plain(divisors: list[float] | None) -> float:
        model = nn.Linear(SIZE, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return next(train.train_steps(job, model, [[[{}]]], 1, [0], divisors=divisors)).norm

    def batch_loss(job: Any, model: nn.Module, examples: Any) -> tuple[Tensor, float]:
        return binary_cross_entropy_with_logits(model(rows).float(), labels, reduction="sum"), 27.0

    monkeypatch.setattr(train, "batch_loss", batch_loss)
    optim = {"name": "lion", "layerwise_lr_decay": 1.0, "learning_rate": 1.0, "min_lr_ratio": 0.0}
    job: Any = SimpleNamespace(
        run={"precision": "bf16", "optim": optim | {"schedule": [[0, 1.0]], "max_grad_norm": None}}
    )
    assert plain([27.0]) == pytest.approx(norm(True), rel=1e-5)
    assert plain(None) == pytest.approx(norm(False), rel=1e-5)
    assert 1e-3 < abs(norm(True) / norm(False) - 1) < 2**-8
    assert norm(True, low=False) == pytest.approx(norm(False, low=False), rel=1e-6)  # control: float32


def test_each_draw_moves_other_weights() -> None:
    drawn = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)]
    for seed, model in enumerate(drawn):
        nn.init.ones_(model.weight)
        perturb_(model, "fp32", seed)
    assert len({tuple(model.weight.flatten().tolist()) for model in drawn}) == 4
    again = nn.Linear(SIZE, SIZE, bias=False)
    nn.init.ones_(again.weight)
    perturb_(again, "fp32", 3)  # control: a perturbation is a function of its seed
    assert torch.equal(again.weight, drawn[3].weight)


def record(loss: float, norm: float, gradient: float = 1.0, change: float = 1.0) -> train.TrainedStep:
    tensors = [{"weight": torch.full((SIZE,), size), "bias": torch.full((3,), size)} for size in (gradient, change)]
    return train.TrainedStep(loss, 1.0, norm, *tensors)


def compared(
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    precision: str,
    ours: train.TrainedStep,
    spread: float,
    needed: int = 0,
) -> list[str]:
    """Return the reported differences of a step whose plain loss and norm are 1, if only the third perturbation changes
    them, by `spread`. `needed`: bytes that several perturbations take."""
    step = SimpleNamespace(number=0, micro_batches=[])
    held = SimpleNamespace(tokenizer=None, evaluated=[], steps=[step])
    plain = SimpleNamespace(run={"precision": precision})

    def trained(side: Any, record_: Any, folder: Any, draw: int, divisors: Any = None) -> Iterator[train.TrainedStep]:
        size = 1 + spread * (draw == 3)
        yield record(size, size)

    monkeypatch.setattr(against_plain.PlainRecord, "read", lambda folder: held)
    monkeypatch.setattr(against_plain, "Plain", lambda *_: plain)
    monkeypatch.setattr(against_plain, "plain_run", lambda *_: {})
    monkeypatch.setattr(against_plain, "_check_numbers", lambda *_: None)
    monkeypatch.setattr(against_plain, "_recorded", lambda *_: iter([ours]))
    monkeypatch.setattr(against_plain, "_trained", trained)
    monkeypatch.setattr(against_plain, "build_model", lambda job, start, empty: torch.nn.Linear(1, 1))
    named = SimpleNamespace(name="classification")
    run = SimpleNamespace(seed=0, precision=precision, task=named)
    job: Any = SimpleNamespace(run=run, optimizer=optimizer_class(optimizer))
    monkeypatch.setattr(against_plain, "_bytes", lambda folder, draws: needed)
    monkeypatch.setattr(against_plain, "load_file", lambda path: {})
    return against_plain.compare_with_plain(job, Path()).differences


def test_four_perturbations_measure_the_rounding_of_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = record(1 + 1e-4, 1 + 1e-4)
    assert not compared(monkeypatch, "muon", "fp32", ours, 5e-5)
    assert compared(monkeypatch, "muon", "fp32", ours, 5e-6)  # controls: more than ten times a perturbation's effect,
    assert not compared(monkeypatch, "adamw", "fp32", ours, 5e-5)  # reported by the first perturbation alone,
    assert compared(monkeypatch, "adamw", "fp32", ours, 5e-5, needed=2**60)  # no memory for more perturbations


def cancelling(bias: float, loss: float = 1.0, weight: float = 6e-5) -> train.TrainedStep:
    gradients = {"weight": torch.full((SIZE,), weight), "bias": torch.full((1,), bias)}
    return train.TrainedStep(loss, 1.0, 8 * weight, gradients, {})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plain", [0.0, 7.5e-9])
@pytest.mark.parametrize(("bias", "differs"), [(7.5e-9, False), (-7.5e-9, False), (1e-6, True)])
def test_terms_that_cancel_out_round_as_the_loss_does(bias: float, differs: bool, plain: float, precision: str) -> None:
    """A reward model's bias has only rounding error as its gradient, from a loss that is large beside the other
    gradients."""
    step = against_plain._compare_step(cancelling(bias), cancelling(plain), [cancelling(plain)], 0, precision)
    assert step.differs == differs


@pytest.mark.parametrize(
    ("bias", "plain", "loss", "weight"),
    [
        (2e-7, 0.0, 100.0, 1e-8),  # more than all other gradients together
        (1e-6, 2e-6, 100.0, 1e-8),  # as large as these
        (1e-6, 1.3e-6, 10.0, 1e-3),  # larger than a last bit of the loss
    ],
)
def test_a_small_gradient_beside_a_large_loss_is_compared(
    bias: float, plain: float, loss: float, weight: float
) -> None:
    ours, theirs = (cancelling(each, loss, weight) for each in (bias, plain))
    assert against_plain._compare_step(ours, theirs, [theirs], 0, "fp32").differs


@pytest.mark.parametrize("odd", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)])
def test_nonfinite_values_never_agree_and_set_no_tolerance(odd: tuple[float, float]) -> None:
    step = against_plain._compare_step(record(*odd), record(*odd), [record(*odd)], 0, "fp32")
    assert step.differs
    assert against_plain._lines(step, record(*odd), record(*odd))[-1] == f"  likely: {causes.NOT_FINITE}"
    assert against_plain._compare_step(record(2, 2), record(1, 1), [record(*odd)], 0, "fp32").differs


def test_a_missing_gradient_is_no_rounding_of_float32() -> None:
    """Exception: last bits change a step by half. Half precision may leave nothing of terms that nearly cancel."""
    plain, chaotic = record(1, 1), record(1, 1, 1.4)
    assert against_plain._compare_step(record(1, 1, 0.0), plain, [chaotic], 0, "fp32").differs
    assert not against_plain._compare_step(record(1, 1, 1.5), plain, [chaotic], 0, "fp32").differs
    assert not against_plain._compare_step(record(1, 1, 0.0), plain, [chaotic], 0, "bf16").differs
    assert not against_plain._compare_step(record(1, 1, 0.0), plain, [record(1, 1, 1.6)], 0, "fp32").differs


@pytest.mark.parametrize(
    ("ours", "plain", "perturbed", "differs"),
    [
        (math.nan, 1.0, 1.0, True),
        (1.0, math.nan, 1.0, True),
        (2.0, 1.0, math.nan, True),
        (2.0, 1.0, 2.0, False),  # controls: a last bit changes as much, and there is no score
        (math.nan, math.nan, math.nan, False),
    ],
)
def test_a_score_that_one_side_lacks_differs(
    ours: float, plain: float, perturbed: float, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, names = iter([{"f1": plain}, {"f1": perturbed}]), list[str]()
    monkeypatch.setattr(against_plain, "_model", lambda *_: nn.Linear(1, 1))
    monkeypatch.setattr(against_plain, "scores", lambda *_: next(scores))
    held: Any = SimpleNamespace(evaluated=[0], evaluation_masked={}, scores={"f1": ours})
    job = SimpleNamespace(run=SimpleNamespace(precision="fp32"))
    side: Any = SimpleNamespace(job=job, plain=None, examples=lambda *_: [])
    lines = against_plain._evaluation(side, held, Path(), names)
    assert bool(lines) == differs


@pytest.mark.parametrize(
    ("ours", "cause"),
    [
        (record(2, 2, 2, 2), causes.of_loss_function()),
        (record(1, 2, 2, 2), "every gradient is 2 times what it should be"),
        (record(1, 2), causes.NORM),
        (record(1, 1, 1, 2), causes.UPDATE),
    ],
)
def test_first_difference_names_the_cause(monkeypatch: pytest.MonkeyPatch, ours: train.TrainedStep, cause: str) -> None:
    *_, last = compared(monkeypatch, "adamw", "fp32", ours, 0.0)
    assert last.startswith(f"  likely: {cause}")
