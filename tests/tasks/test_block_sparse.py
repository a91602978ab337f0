"""BigBird's attention is settled when the model is built, so that no forward draws anything or changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lockstep.tasks.models import models
from lockstep.tasks.models.model_configs import ModelChoice
from support.harness import tiny
from support.messages import raises

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


def draws_in_forward(model: Any) -> bool:
    """Whether a forward in evaluation mode moves torch's generator."""
    before = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([[5, 6, 7, 8]]), attention_mask=torch.ones(1, 4, dtype=torch.long))
    return not torch.equal(before, torch.get_rng_state())


def test_forward_draws_no_random_numbers() -> None:
    config = AutoConfig.for_model("big_bird", vocab_size=40, **SMALL)
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(config)
    torch.manual_seed(0)
    ours = AutoModelForSequenceClassification.from_config(config)
    before = torch.get_rng_state()
    models.settle_block_sparse(ours)
    assert torch.equal(before, torch.get_rng_state())
    assert draws_in_forward(theirs)  # the control: transformers draws layers that it does not use
    assert not draws_in_forward(ours)
    ours_after, theirs_after = ours.state_dict(), theirs.state_dict()
    assert ours_after.keys() == theirs_after.keys()
    assert all(torch.equal(ours_after[name], theirs_after[name]) for name in theirs_after)


@pytest.mark.parametrize("family", ["big_bird", "bigbird_pegasus"])
def test_lengths_that_would_switch_big_birds_attention_are_refused(family: str) -> None:
    config = AutoConfig.for_model(family)
    models.check_block_sparse(config, 704, "data.max_length")
    with raises("LS3080", "704"):
        models.check_block_sparse(config, 705, "data.max_length")
    config.attention_type = "original_full"
    models.check_block_sparse(config, 705, "data.max_length")


def test_a_run_is_refused_before_it_starts() -> None:
    run = tiny("data.max_length=800", model={"type": "big_bird", "config": SMALL | {"max_position_embeddings": 1024}})
    with raises("LS3080"):
        models.check(ModelChoice.of(run))
