"""Chooses the matrix products of a model that are split into leaves (`strategy.tensor_leaves`), and installs the split
ones.

In: a run, its model, and the tensor-parallel ranks. Out: a refusal; or the same model, whose split products use
`exact/tensor_leaves.py`, with this rank's part of the weights if there are several ranks.

transformers' plan for tensor parallelism defines which products are split along their outputs and which along their
inner dimension, if the family has one. `_PLANS` has plans for families without one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.job import Job
from lockstep.strategies.engines import layers
from lockstep.strategies.exact.tensor_leaves import (
    LeafRanks,
    Product,
    WeightCut,
    column_product,
    cut_weight,
    row_product,
)
from lockstep.tasks.models import heads, padding, small_models
from lockstep.tasks.models.model_configs import load_config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEY = "strategy.tensor_leaves"
COLUMN, ROW = "colwise", "rowwise"  # transformers' names
_PASSED = "replicated_with_grad_allreduce"  # a norm per head: leaves share its weight, and their gradients are summed


@dataclass(frozen=True)
class FamilyPlan:
    """A tensor-parallel plan. `products`: patterns of module names' ends, and how each product is split. `fused`:
    number of matrices side by side in a fused product. `counts`: module names, and their attributes that count over all
    leaves."""

    products: Mapping[str, str]
    fused: Mapping[str, int]
    counts: Mapping[str, tuple[str, ...]]


_BERT = FamilyPlan(
    {
        r"encoder\.layer\.\d+\.attention\.self\.(query|key|value)": COLUMN,
        r"encoder\.layer\.\d+\.attention\.output\.dense": ROW,
        r"encoder\.layer\.\d+\.intermediate\.dense": COLUMN,
        r"encoder\.layer\.\d+\.output\.dense": ROW,
    },
    {},
    {r"encoder\.layer\.\d+\.attention\.self": ("num_attention_heads", "all_head_size")},
)
_T5 = FamilyPlan(
    {
        r"block\.\d+\.layer\.\d+\.(SelfAttention|EncDecAttention)\.[qkv]": COLUMN,
        r"block\.\d+\.layer\.\d+\.SelfAttention\.relative_attention_bias": COLUMN,
        r"block\.\d+\.layer\.\d+\.(SelfAttention|EncDecAttention)\.o": ROW,
        r"block\.\d+\.layer\.\d+\.DenseReluDense\.wi(_[01])?": COLUMN,
        r"block\.\d+\.layer\.\d+\.DenseReluDense\.wo": ROW,
    },
    {},
    {r"block\.\d+\.layer\.\d+\.(SelfAttention|EncDecAttention)": ("n_heads", "inner_dim")},
)
_GPT2 = FamilyPlan(
    {
        r"h\.\d+\.attn\.c_attn": COLUMN,
        r"h\.\d+\.attn\.c_proj": ROW,
        r"h\.\d+\.mlp\.c_fc": COLUMN,
        r"h\.\d+\.mlp\.c_proj": ROW,
    },
    {r"h\.\d+\.attn\.c_attn": 3},
    {r"h\.\d+\.attn": ("num_heads", "split_size", "embed_dim")},
)
_PLANS = {"bert": _BERT, "roberta": _BERT, "xlm-roberta": _BERT, "electra": _BERT}
_PLANS |= {"gpt2": _GPT2, "t5": _T5, "mt5": _T5}


# -- what is refused -------------------------------------------------------------------------------------------------


def check(job: Job) -> None:
    """Check the run before any process starts. Errors: `RunError`."""
    run, task = job.run, job.task
    leaves = run.strategy.tensor_leaves
    if leaves == 1:
        return
    if not run.strategy.exact:
        raise RunError(
            "LS4310", f"{KEY}: it fixes the order of sums, which strategy.exact=false gives up; remove one of them"
        )
    conflicts = {
        "model.adapter": run.model.adapter,
        "model.quantization": run.model.quantization,
        "model.compile": run.model.compiled,
    }
    for key, value in conflicts.items():
        if value:
            raise RunError("LS4311", f"{KEY}: cannot be combined with {key}; remove one of them")
    if run.strategy.name == "pipeline":
        raise RunError(
            "LS4312",
            f"{KEY}: pipeline stages compute whole products; use strategy.name=fsdp2 or ddp, or remove it",
        )
    if task.own_model:
        raise RunError("LS4313", f"{KEY}: transformers has no tensor-parallel plan for a custom model; remove it")
    config = load_config(run.model)
    plan = plan_of(config, leaves)
    if (model := layers.empty_model(run.model, config)) is None:  # checked when the model is built
        return
    list(_products(plan, leaves, model))
    if task.head is None or not heads.of(task.head).reads_texts:
        return
    if (why := padding.kept_trial(run.model, task.head, config, differs)) is not None:
        raise RunError("LS4319", f"{KEY}: a {config.model_type} cannot be cut into leaves: {why}; remove it")


def differs(section: ModelSection, head: str, config: Any) -> str | None:
    """Explain why a small model of this config cannot be split, or computes different results; None if results
    match."""
    why = "a small model of this family cannot be built"
    with torch.random.fork_rng([]):
        for variant in small_models.smaller(config, head):
            batches = [small_models.examples(head, *lengths) for lengths in small_models.BATCHES[:2]]
            try:
                whole, cut = (small_models.small(section, head, variant, section.attention) for _ in range(2))
                outputs = [small_models.computed(whole, head, batch) for batch in batches]
            except Exception as error:  # inconsistent config entries
                why = f"a small model of this family failed ({small_models.brief(error)})"
                continue
            try:
                install_leaves(cut, variant, LeafRanks(2))
                parts = [small_models.computed(cut, head, batch) for batch in batches]
            except Exception as error:
                return f"the operations between its products cannot be computed in parts ({small_models.brief(error)})"
            for (logits, gradients), (own, own_gradients) in zip(outputs, parts, strict=True):
                pairs: list[tuple[Tensor | None, Tensor | None]] = [(logits, own)]
                pairs += zip(gradients, own_gradients, strict=True)
                if not all(_near(*pair) for pair in pairs):
                    return "computed in parts, a small model of this family gives other results"
            return None
    return why


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or not one.numel():
        return one is other or (one is not None and other is not None)
    size = max(float(one.abs().max()), 1e-3)
    return bool((one - other).abs().max() <= small_models.NEAR * size)


def plan_of(config: Any, leaves: int) -> FamilyPlan:
    """Return the plan of a model's family. Errors: `RunError` if it has none, or the attention heads cannot be
    divided."""
    plan = _PLANS.get(config.model_type)
    if plan is None:
        theirs = getattr(config, "base_model_tp_plan", None) or {}
        if not theirs or set(theirs.values()) - {COLUMN, ROW, _PASSED}:
            raise RunError(
                "LS4314",
                f"{KEY}: the products of a {config.model_type} cannot be cut into leaves: transformers has no "
                "tensor-parallel plan for it, or a plan for layers other than Linear (llama, qwen2, qwen3, mistral "
                "and their like, "
                f"{', '.join(sorted(_PLANS))} can be cut); remove it",
            )
        products = {re.escape(n).replace(r"\*", r"\d+"): style for n, style in theirs.items() if style != _PASSED}
        plan = FamilyPlan(products, {}, {})
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None) or leaves
        if count % leaves:
            raise RunError(
                "LS4315",
                f"{KEY}: {leaves} leaves cannot share the {count} {name} of a {config.model_type}; choose a number "
                f"that divides {count}",
            )
    return plan


@dataclass(frozen=True)
class PlannedProduct:
    """A module whose product is split."""

    name: str
    module: nn.Module
    column: bool
    fused: int

    @property
    def dim(self) -> int:
        """The dimension of its weight to split."""
        outputs = 0 if isinstance(self.module, nn.Linear) else 1
        return outputs if self.column else 1 - outputs

    @property
    def size(self) -> int:
        """The size of the split dimension, from the module's attributes, because an engine may have replaced the
        weight."""
        module: Any = self.module
        if isinstance(module, nn.Embedding):
            sizes = (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            sizes = (module.out_features, module.in_features)
        else:
            sizes = (module.nx, module.nf)  # a Conv1D
        return int(sizes[self.dim])


def _products(plan: FamilyPlan, leaves: int, model: nn.Module) -> Iterator[PlannedProduct]:
    """Yield the model's products in the plan. Errors: `RunError` if there are none, or one cannot be split."""
    ways = set[str]()
    for name, module in model.named_modules():
        if (way := _entry(plan.products, name)) is None:
            continue
        product = PlannedProduct(name, module, way == COLUMN, _entry(plan.fused, name) or 1)
        if type(module) not in _calls() or (isinstance(module, nn.Embedding) and not product.column):
            raise RunError(
                "LS4316", f"{KEY}: {name} is a {type(module).__name__}, which cannot be cut into leaves; remove it"
            )
        if (size := product.size) % (leaves * product.fused):
            side = "outputs" if product.column else "inputs"
            raise RunError(
                "LS4317",
                f"{KEY}: the {size // product.fused} {side} of {name} do not divide into {leaves} leaves; choose "
                "a number that divides them",
            )
        ways.add(way)
        yield product
    if ways != {COLUMN, ROW}:
        raise RunError("LS4318", f"{KEY}: this model has none of the products in its family's plan; remove it")


def _entry(patterns: Mapping[str, Any], name: str) -> Any:
    return next((value for end, value in patterns.items() if re.search(rf"(^|\.){end}$", name)), None)


# -- the model -------------------------------------------------------------------------------------------------------


def install(section: ModelSection, model: nn.Module, leaves: int, ranks: LeafRanks | None = None) -> None:
    """Replace the `forward` of split products, in place. `ranks`: the tensor-parallel ranks; None: this rank has all
    leaves. Errors: `RunError`."""
    install_leaves(model, load_config(section), ranks or LeafRanks(leaves))


def install_leaves(model: nn.Module, config: Any, ranks: LeafRanks) -> None:
    """Replace the `forward` of split products in a model of this config."""
    plan, leaves = plan_of(config, ranks.count), ranks.count
    for product in _products(plan, leaves, model):
        module: Any = product.module
        if product.column:
            holding = "own" if product.fused == 1 else "rows"
            weight = WeightCut(product.dim, product.fused, holding)
            bias = WeightCut(0, product.fused, "own" if product.fused == 1 else "all")
            module.forward = partial(_column, module, ranks, weight, bias)
        else:
            module.forward = partial(_row, module, ranks, WeightCut(product.dim))
    for name, part in model.named_modules():
        for attribute in _entry(plan.counts, name) or ():
            setattr(part, attribute, getattr(part, attribute) // leaves)


def share_out(section: ModelSection, leaves: int, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each split weight over the mesh by leaves; a fused weight, whose leaves are not contiguous, by equal shares
    of rows."""
    # Gathering such weights for a checkpoint warns about the order of sums, but sums nothing.
    from torch.distributed.tensor import Shard, distribute_tensor

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for product in _products(plan_of(load_config(section), leaves), leaves, model):
        module: Any = product.module
        dims = {"weight": 0 if product.fused > 1 else product.dim}
        if product.column and product.fused == 1 and getattr(module, "bias", None) is not None:
            dims["bias"] = 0
        for name, dim in dims.items():
            whole = getattr(module, name)
            part = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _conv1d(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*inputs.shape[:-1], weight.shape[1])


def _embedding(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return embedding(inputs, weight)


@cache
def _calls() -> dict[type[nn.Module], Product]:
    from transformers.pytorch_utils import Conv1D

    return {nn.Linear: linear, Conv1D: _conv1d, nn.Embedding: _embedding}


def _column(module: Any, ranks: LeafRanks, weight: WeightCut, bias: WeightCut, inputs: Tensor) -> Tensor:
    dtype = _computed_in(module, inputs)
    weights = cut_weight(_local_weight(module.weight), weight, ranks, dtype)
    own = getattr(module, "bias", None)
    biases = None if own is None else cut_weight(_local_weight(own), bias, ranks, dtype)
    return column_product(_calls()[type(module)], ranks, inputs, weights, biases)


def _row(module: Any, ranks: LeafRanks, weight: WeightCut, inputs: Tensor) -> Tensor:
    weights = cut_weight(_local_weight(module.weight), weight, ranks, _computed_in(module, inputs))
    return row_product(_calls()[type(module)], ranks, inputs, weights, module.bias)


def _local_weight(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, differentiably."""
    local = getattr(weight, "to_local", None)  # of a DTensor, whose package is slow to import
    return weight if local is None else local()


def _computed_in(module: Any, inputs: Tensor) -> torch.dtype:
    """Return the dtype of a product: autocast's, or else the weight's."""
    kind, weight = inputs.device.type, module.weight.dtype
    low = torch.is_autocast_enabled(kind) and not isinstance(module, nn.Embedding)
    return torch.get_autocast_dtype(kind) if low else weight
