"""`strategy.tensor_leaves` gives the bits of one process at any number of tensor ranks, alone and combined with data
parallelism; the controls give other bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from lockstep.config.run import Run
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import tensor_plans
from lockstep.strategies.exact import tensor_leaves
from lockstep.strategies.exact.gradient_sum import ReductionTree
from lockstep.strategies.exact.tensor_leaves import (
    LeafRanks,
    Leaves,
    WeightCut,
    column_product,
    cut_weight,
    row_product,
)
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.training.resolve import resolve_strategy
from support import fsdp2_runs
from support.fsdp2_runs import steps_of
from support.harness import run_on, tiny
from support.marks import long, slow
from support.messages import raises

_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_T5 = {"d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}
FAMILIES = {
    "llama": {"type": "llama", "config": _DECODER | {"attention_dropout": 0.1}},
    "qwen2": {"type": "qwen2", "config": _DECODER | {"num_attention_heads": 8}},  # two query heads per key head
    "qwen3": {"type": "qwen3", "config": _DECODER | {"head_dim": 8}},
    "gpt2": {"type": "gpt2", "config": {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 32}},
    "bert": {"type": "bert", "config": _BERT | {"max_position_embeddings": 32}},
    "t5": {"type": "t5", "config": _T5},
    "t5-gated": {"type": "t5", "config": _T5 | {"feed_forward_proj": "gated-gelu"}},
}
STILL = {  # each family without dropout
    "llama": {"attention_dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
    "t5-gated": {"dropout_rate": 0.0},
}


FEWER = "micro_batches=4"  # ranks that share a leaf run all micro-batches


def of(ranks: int, *overrides: str, **values: Any) -> dict[str, Any]:
    return fsdp2_runs.of(ranks, FEWER, *overrides, **values)


@cache
def alone(family: str, precision: str, leaves: int = 4) -> dict[str, Any]:
    return of(1, f"precision={precision}", model=FAMILIES[family], strategy={"name": "single", "tensor_leaves": leaves})


def together(family: str, precision: str, ranks: int, tensor: int, leaves: int = 4) -> dict[str, Any]:
    strategy = {"name": "fsdp2", "tensor_leaves": leaves, "options": {"tensor_parallel": tensor}}
    return of(ranks, f"precision={precision}", model=FAMILIES[family], strategy=strategy)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(found[key] == wanted[key] for key in ("digest", "loss", "norm", "exported"))


# -- the bits of one process -----------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2)])
def test_tensor_ranks_have_the_bits_of_one_process(ranks: int, tensor: int) -> None:
    """Tensor ranks alone, and two of them combined with two data-parallel ranks, have the bits of one process."""
    found = together("llama", "fp32", ranks, tensor)
    assert same(found, alone("llama", "fp32"))
    placements, _ = found["held"]["model.layers.0.mlp.up_proj.weight"]
    assert len(placements) == 2


# CI runs one precision per family, in turns; the other takes as long again. Four ranks hold a leaf each, or two each
# with two data-parallel ranks. One and two ranks hold the same leaves together, and are run by hand.
EACH_TIME = ("gpt2", "t5-gated")
SHAPES = {"four": ((4, 4), (4, 2)), "fewer": ((1, 1), (2, 2))}
IN_TURNS = [
    (slow if (i + j) % 2 == 0 and shapes == "four" and family in EACH_TIME else long)(family, precision, shapes)
    for i, family in enumerate(FAMILIES)
    for j, precision in enumerate(("fp32", "bf16"))
    for shapes in SHAPES
]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "precision", "shapes"), IN_TURNS)
def test_every_family_has_the_bits_of_one_process(family: str, precision: str, shapes: str) -> None:
    for ranks, tensor in SHAPES[shapes]:
        assert same(together(family, precision, ranks, tensor), alone(family, precision)), (ranks, tensor)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("ddp", 2, {}),
        ("allreduce", 3, {}),
        ("fsdp2", 2, {"gather": "step"}),
        ("fsdp2", 3, {"gather": "micro_batch"}),
        ("fsdp2", 4, {"replicate": 2}),
        ("hf_accelerate", 2, {}),
        ("hf_accelerate", 2, {"fsdp": {}}),
        ("hf_trainer", 2, {}),
        ("zero1", 2, {}),
        ("zero2", 2, {}),
    ],
)
def test_tensor_leaves_have_the_same_bits_under_every_strategy(name: str, ranks: int, options: dict) -> None:
    strategy = {"name": name, "tensor_leaves": 4, "options": options}
    assert same(of(ranks, model=FAMILIES["gpt2"], strategy=strategy), alone("gpt2", "fp32"))


@pytest.mark.processes
@pytest.mark.parametrize("family", ["gpt2", long("t5")])
def test_activations_recomputed_in_backward_keep_the_bits(family: str) -> None:
    model = FAMILIES[family] | {"checkpoint_activations": True}
    strategy = {"name": "fsdp2", "tensor_leaves": 4, "options": {"tensor_parallel": 2}}
    assert same(of(2, model=model, strategy=strategy), alone(family, "fp32"))


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_leaves_match_the_whole_model_within_rounding(family: str) -> None:
    """Weights after one step of plain gradient descent match the whole model, so the gradients do too."""
    model = {**FAMILIES[family], "config": FAMILIES[family]["config"] | STILL.get(family, {})}
    sgd = {"optim": {"name": "sgd", "learning_rate": 0.1}, "model": model}
    wanted = of(1, "strategy.name=single", **sgd)
    found = of(1, strategy={"name": "single", "tensor_leaves": 4}, **sgd)
    assert found["digest"] != wanted["digest"]  # control: the arithmetic differs
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(wanted["norm"], rel=5e-6)
    for key, weight in wanted["weights"].items():
        assert (found["weights"][key] - weight).abs().max() <= 2e-6, key


# -- controls --------------------------------------------------------------------------------------------------------


def from_left_to_right(self: LeafRanks, tensors: Sequence[Tensor]) -> Tensor:
    return sum((tensor.float() for tensor in tensors[1:]), tensors[0].float())


def in_one_product(product: Any, ranks: LeafRanks, inputs: Leaves, weights: Any, bias: Tensor | None) -> Tensor:
    ranks.close()
    whole = product(torch.cat(inputs.leaves, -1), torch.cat(list(weights), 1 if product is linear else 0), None)
    return whole if bias is None else whole + bias


def changed(world: World, run: Run, name: str, other: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, other)
        return steps_of(world, run)["digest"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("lockstep.strategies.exact.tensor_leaves.LeafRanks.sum", from_left_to_right),
        ("lockstep.strategies.engines.tensor_plans.row_product", in_one_product),
    ],
)
def test_the_control_another_sum_has_other_bits(name: str, other: Any) -> None:
    run = tiny(FEWER, "precision=fp32", model=FAMILIES["gpt2"], strategy={"name": "single", "tensor_leaves": 4})
    assert run_on(1, changed, run, name, other) != [alone("gpt2", "fp32")["digest"]]


@pytest.mark.processes
def test_the_control_another_number_of_leaves_has_other_bits() -> None:
    assert alone("gpt2", "fp32", 2)["digest"] != alone("gpt2", "fp32", 4)["digest"]


# -- sums, weights, random numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [2, 3, 4, 6, 8])
def test_leaves_are_summed_over_the_tree(leaves: int) -> None:
    parts = [torch.randn(33, generator=torch.Generator().manual_seed(i)) for i in range(leaves)]
    tree = ReductionTree(leaves)
    for i, part in enumerate(parts):
        tree.add(i, [part.clone()])
    before = [part.clone() for part in parts]
    assert torch.equal(LeafRanks(leaves).sum(parts), tree.root[0])
    assert all(map(torch.equal, parts, before))  # the inputs were not written to


def test_low_precision_is_added_in_float32_and_rounded_once() -> None:
    parts = [torch.tensor([1.0 + i / 128]).bfloat16() for i in range(4)]
    summed = LeafRanks(4).sum(parts)
    assert summed.dtype == torch.float32
    assert float(summed) == sum(float(part) for part in parts)


@pytest.mark.parametrize(("dim", "parts"), [(0, 1), (1, 1), (1, 3)])
def test_the_gradient_of_a_sharded_weight_is_assembled(dim: int, parts: int) -> None:
    weight = torch.randn(12, 24, requires_grad=True)
    leaves = cut_weight(weight, WeightCut(dim, parts), LeafRanks(4), torch.float32)
    assert all(leaf.is_contiguous() and leaf.data_ptr() % 64 == 0 for leaf in leaves)
    sum((i + 1) * leaf.square().sum() for i, leaf in enumerate(leaves)).backward()
    of_leaf = torch.arange(1.0, 5).repeat_interleave(weight.shape[dim] // parts // 4).repeat(parts)
    assert torch.equal(weight.grad, 2 * weight * (of_leaf if dim else of_leaf[:, None]))


def test_replicated_weights_get_gradients_of_all_leaves_over_the_tree() -> None:
    """A per-head norm's weight gets its gradient from all leaves, added over the tree. Autograd alone would add them
    from left to right."""
    ranks, weight = LeafRanks(4), torch.ones(500, requires_grad=True)
    parts = [torch.randn(500, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    sum(leaf.sum() for leaf in (Leaves.of(parts, ranks, False) * weight).leaves).backward()
    assert torch.equal(weight.grad, ranks.sum(parts))
    orders = (parts, parts[::-1])
    assert not any(torch.equal(weight.grad, from_left_to_right(ranks, order)) for order in orders)  # control


def test_a_leaf_draws_the_same_numbers_on_any_rank() -> None:
    ranks, dropped, after = LeafRanks(4), [], []
    for own in (range(4), range(2), range(2, 4)):
        ranks.own = own
        torch.manual_seed(5)
        dropped.append(dropout(Leaves.of([torch.ones(50) for _ in own], ranks, False), 0.5, True).leaves)
        after.append(torch.rand(1))
    every, first, last = dropped
    assert all(map(torch.equal, every, [*first, *last]))
    assert not torch.equal(every[0], every[1])
    assert len({float(number) for number in after}) == 1  # the next draws are equal, too


# -- refusals --------------------------------------------------------------------------------------------------------


def leaves_of(count: int = 2, tracked: bool = True) -> Leaves:
    weights = [torch.ones(3, 4, requires_grad=tracked) for _ in range(count)]
    return column_product(linear, LeafRanks(count), torch.ones(2, 4), weights, None)


class Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_unsupported_operations_on_leaves_raise() -> None:
    with raises("LS4303", "item"):
        leaves_of().sum().item()
    with raises("LS4303", "__setitem__"):
        torch.zeros(2, 3)[:] = leaves_of()
    with raises("LS4302"):
        row_product(linear, leaves_of().ranks, Lost.apply(leaves_of()), [torch.ones(5, 3)] * 2, None)
    with raises("LS4301"):
        row_product(linear, LeafRanks(2), torch.ones(2, 3), [torch.ones(5, 3)] * 2, None)
    with raises("LS4300"):
        column_product(linear, LeafRanks(2), leaves_of(), [torch.ones(5, 3)] * 2, None)
    with raises("LS4304"), torch._C.DisableTorchFunctionSubclass():
        leaves_of() + 1


def test_frozen_layers_have_no_gradient_to_lose() -> None:
    given = leaves_of(tracked=False)
    assert row_product(linear, given.ranks, given, [torch.ones(5, 3)] * 2, None).shape == (2, 5)


LLAMA = FAMILIES["llama"]


@pytest.mark.parametrize(
    ("strategy", "values", "said"),
    [
        ({"tensor_leaves": 4, "exact": False}, {}, ("LS4310", "strategy.exact")),
        ({"tensor_leaves": 4}, {"model": LLAMA | {"adapter": {"name": "lora"}}}, ("LS4311", "model.adapter")),
        ({"tensor_leaves": 4}, {"model": LLAMA | {"compile": True}}, ("LS4311", "model.compile")),
        ({"tensor_leaves": 4, "name": "pipeline"}, {}, ("LS4312",)),
        ({"tensor_leaves": 4}, {"model": {"type": "bloom", "config": {"n_layer": 2}}}, ("LS4314", "bloom")),
        ({"tensor_leaves": 8}, {"model": LLAMA}, ("LS4315", "8", "4", "num_attention_heads")),
        (
            {"tensor_leaves": 4},
            {"model": {"type": "llama", "config": _DECODER | {"intermediate_size": 66}}},
            ("LS4317", "66", "mlp.gate_proj"),
        ),
        ({"tensor_leaves": 4, "name": "zero3"}, {}, ("LS4145", "zero2")),
        ({"name": "fsdp2", "options": {"tensor_parallel": 2}}, {}, ("LS4085", "2")),
        ({"name": "fsdp2", "tensor_leaves": 3, "options": {"tensor_parallel": 2}}, {}, ("LS4085", "3")),
    ],
)
def test_models_that_cannot_be_split_are_refused(strategy: dict, values: dict, said: tuple[str, ...]) -> None:
    with raises(*said):
        resolve_strategy(tiny(strategy={"name": "ddp"} | strategy, **{"model": FAMILIES["gpt2"]} | values), 2)


def test_families_whose_parts_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family plan that omits a product is refused: the layer after it would get partial inputs."""
    wrong = tensor_plans.FamilyPlan({**tensor_plans._GPT2.products}, {}, tensor_plans._GPT2.counts)  # q, k, v in one
    monkeypatch.setitem(tensor_plans._PLANS, "gpt2", wrong)
    run = tiny(model=FAMILIES["gpt2"], strategy={"name": "ddp", "tensor_leaves": 4})
    config = tensor_plans.load_config(run.model)
    assert tensor_plans.differs(run.model, "classification", config) is not None


@pytest.mark.parametrize(
    ("processes", "replicate", "wanted"),
    [(8, 1, (4, 1)), (6, 1, (2, 1)), (3, 1, (1, 1)), (7, 2, (1, 1)), (6, 2, (2, 1))],
)
def test_surviving_ranks_share_all_leaves(processes: int, replicate: int, wanted: tuple[int, int]) -> None:
    options = {"tensor_parallel": 4, "replicate": replicate}
    run = tiny(strategy={"name": "fsdp2", "tensor_leaves": 4, "options": options})
    left = FSDP2.recovery.fit_options(run.strategy, processes)
    assert (left["tensor_parallel"], left["replicate"]) == wanted


def test_a_resume_with_other_tensor_leaves_is_refused() -> None:
    run = tiny(strategy={"name": "ddp", "tensor_leaves": 4})
    assert arithmetic_of(run)["strategy.tensor_leaves"] == 4
    assert Job.of(run).default("strategy.tensor_leaves") == 1


def test_modules_keep_their_weights_names() -> None:
    run = tiny(model=FAMILIES["bert"], strategy={"name": "single", "tensor_leaves": 2})
    import transformers

    model: nn.Module = transformers.BertModel(tensor_plans.load_config(run.model))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensor_plans.install(run.model, model, 2)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert tensor_leaves.LeafRanks(2).own == range(2)
