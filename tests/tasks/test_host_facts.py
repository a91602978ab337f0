"""Host facts about masks, positions and targets equal those read from the tensors, which are read if there are none.
tests/strategies/test_without_gpu.py counts how often the host waits."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTokenClassification
from transformers import masking_utils as theirs

from lockstep.data import host_facts
from lockstep.data.batch import IGNORED, TARGETS, MicroBatch
from lockstep.data.host_facts import RealTokens, TargetPlaces, TextsOfRows
from lockstep.tasks.models import masks, unpadded
from support.task_runs import BERT, GPT2, MARIAN

MASKS = {
    "full": [[1, 1, 1, 1]] * 3,
    "right": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
    "left": [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]],
    "nothing": [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
}
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "both ways": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(2),
}


def knowing(mask: Tensor) -> Tensor:
    """A copy with what the host knows of it."""
    return host_facts.attach(mask.clone(), RealTokens.of(mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_equal_those_of_transformers(mask: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = torch.tensor(MASKS[mask]).bool()
    asked: list[str] = []
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        real = getattr(theirs, name)
        monkeypatch.setattr(
            theirs,
            name,
            lambda padding, *a, real=real: (asked.append("") if padding is not None else None, real(padding, *a))[1],
        )
    for causal_skip, skip, q_length in itertools.product((True, False), (True, False), (4, 6)):
        options = {"mask_function": FUNCTIONS[function], "allow_is_causal_skip": causal_skip}
        options |= {"allow_is_bidirectional_skip": skip, "local_size": 2 if function == "window" else None}
        expected = masks._sdpa_mask(3, q_length, 4, attention_mask=given, **options)
        asked.clear()
        found = masks.sdpa_mask(3, q_length, 4, attention_mask=knowing(given), **options)
        assert (found is None) == (expected is None)
        assert found is None or (found.shape == expected.shape and torch.equal(found, expected))
        assert not asked or (causal_skip and q_length != 4 and mask != "full")  # nobody's decoder in training


def test_the_control_facts_are_used() -> None:
    """A mask of which something untrue is known gives another answer."""
    padded = torch.tensor(MASKS["right"]).bool()
    wrong = host_facts.attach(padded.clone(), RealTokens.everywhere(3, 4, "cpu"))
    assert masks.sdpa_mask(3, 4, 4, attention_mask=padded) is not None
    assert masks.sdpa_mask(3, 4, 4, attention_mask=wrong) is None
    positions = torch.tensor([[0, 1, 0, 1]])
    lie = host_facts.attach(positions.clone(), TextsOfRows((True,)))
    assert masks.packed(positions) is not None
    assert masks.packed(lie) is None


@pytest.mark.parametrize(
    "positions", [[[0, 1, 2, 3]], [[0, 1, 0, 1], [0, 1, 2, 3]], [[5, 6, 7, 8], [0, 1, 2, 3]], [[0]]]
)
def test_texts_of_rows_equal_those_of_transformers(positions: list[list[int]]) -> None:
    given = torch.tensor(positions)
    expected = masks._packed(given)
    found = masks.packed(host_facts.attach(given.clone(), TextsOfRows.of(given)))
    assert (found is None) == (expected is None)
    assert found is None or torch.equal(found, expected)
    assert masks.packed(given) is expected is None or torch.equal(masks.packed(given), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_places_of_real_tokens(mask: str) -> None:
    given = torch.tensor(MASKS[mask])
    tokens = RealTokens.of(given)
    assert tokens.lengths == tuple(sum(row) for row in MASKS[mask])
    assert tokens.index.tolist() == [i for i, real in enumerate(itertools.chain(*MASKS[mask])) if real]
    assert tokens.ends.tolist() == [0, *itertools.accumulate(tokens.lengths)]
    assert tokens.on_the_right == (mask in ("full", "right", "nothing"))
    assert tokens.full == (mask == "full")
    some, expected = tokens.first(2), RealTokens.of(given[:2])
    assert (some.lengths, some.width) == (expected.lengths, expected.width)
    assert torch.equal(some.index, expected.index)
    assert torch.equal(some.ends, expected.ends)
    if tokens.full:
        every = RealTokens.everywhere(3, 4, "cpu")
        assert (every.lengths, every.width, every.on_the_right) == (tokens.lengths, 4, True)
        assert torch.equal(every.index, tokens.index)
        assert torch.equal(every.ends, tokens.ends)
        assert every.ends.dtype == tokens.ends.dtype


def test_mask_facts_are_kept_by_copies_only() -> None:
    ids, targets = torch.arange(12).view(3, 4), torch.tensor([[1, IGNORED, 2, 3]] * 3)
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(MASKS["right"]), TARGETS: targets}
    micro = MicroBatch(0, inputs, targets)
    there = MicroBatch(0, host_facts.on_device(inputs, torch.device("meta")), targets)
    tokens = host_facts.facts(there.inputs["attention_mask"], RealTokens)
    places = host_facts.facts(there.inputs[TARGETS], TargetPlaces)
    assert tokens is not None
    assert tokens.lengths == (4, 2, 1)
    assert tokens.index.is_meta
    assert tokens.index.shape == (7,)
    assert places is not None
    assert places.index.shape == (9,)
    assert places.index.is_meta
    assert host_facts.facts(there.inputs["input_ids"], RealTokens) is None
    assert host_facts.facts(micro.to(torch.device("cpu")).inputs["attention_mask"], RealTokens) is None
    changed = there.inputs["attention_mask"] + 0
    assert host_facts.facts(changed, RealTokens) is None
    blank = there.blank().inputs
    tokens, places = (
        host_facts.facts(blank["attention_mask"], RealTokens),
        host_facts.facts(blank[TARGETS], TargetPlaces),
    )
    assert tokens is not None
    assert tokens.lengths == (4, 2)
    assert tokens.index.shape == (6,)
    assert places is not None
    assert places.index.shape == (0,)


def small(kind: dict[str, Any], auto: Any, attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind["type"], **kind["config"], vocab_size=50, pad_token_id=0)
    model = auto.from_config(config, attn_implementation=attention)
    if attention == unpadded.NAME:
        unpadded.install(model)
    masks.prepare(model)
    return model.train()


FAMILIES = {
    "gpt2": (GPT2, AutoModelForCausalLM),
    "bert": (BERT, AutoModelForTokenClassification),
    "marian": (MARIAN, AutoModelForSeq2SeqLM),
}


@pytest.mark.parametrize("attention", ["sdpa", unpadded.NAME])
@pytest.mark.parametrize("mask", ["full", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same_bits(family: str, mask: str, attention: str, monkeypatch: Any) -> None:
    """Results are equal with and without facts, and a mask with facts is never read."""
    model = small(*FAMILIES[family], attention)
    real, ids = torch.tensor(MASKS[mask]), torch.randint(3, 50, (3, 4), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": real}
    if family == "marian":
        inputs |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": real}
    sides, looks = [], []
    looked = RealTokens.of.__func__
    monkeypatch.setattr(RealTokens, "of", classmethod(lambda cls, m: (looks.append(m), looked(cls, m))[1]))
    for known in (False, True):
        if known:
            for name in host_facts.MASKS:
                inputs |= (
                    {name: host_facts.attach(inputs[name].clone(), looked(RealTokens, real))} if name in inputs else {}
                )
        looks.clear()
        torch.manual_seed(1)  # dropout
        model.zero_grad()
        logits = model(**inputs).logits
        (logits * real[..., None]).square().sum().backward()
        sides.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert bool(looks) == (attention == unpadded.NAME and not known)
    assert len(sides[0]) == len(sides[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
