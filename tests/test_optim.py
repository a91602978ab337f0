"""Schedules against transformers' own, groups, and the two optimizers."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from lockstep.config.sections import OptimSection
from lockstep.strategies.exact import optim


@pytest.mark.parametrize(
    ("ours", "theirs"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_rates_are_those_of_transformers(ours: str, theirs: str, warmup: int) -> None:
    section = OptimSection(learning_rate=3e-4, schedule=ours, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(theirs, optimizer, warmup, 50)
    for step in range(50):
        assert optim.learning_rate(section, step, 50) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_warmup_as_a_fraction() -> None:
    by_steps = OptimSection(warmup_steps=10)
    by_share = OptimSection(warmup_fraction=0.1)
    assert [optim.learning_rate(by_steps, t, 100) for t in range(100)] == [
        optim.learning_rate(by_share, t, 100) for t in range(100)
    ]


def test_biases_and_norms_are_not_decayed() -> None:
    model = BertForSequenceClassification(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    exempt = optim.undecayed(model)
    assert {n for n, _ in model.named_parameters() if "LayerNorm" in n or n.endswith("bias")} == exempt
    decayed, free = optim.build(OptimSection(weight_decay=0.1), model).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert all(p.ndim == 1 for p in free["params"])
    assert all(p.ndim == 2 for p in decayed["params"])


def test_optimizers_are_fused() -> None:
    model = torch.nn.Linear(2, 2)
    for name, kind in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        optimizer = optim.build(OptimSection(name=name), model)
        assert isinstance(optimizer, kind)
        assert optimizer.defaults["fused"]
