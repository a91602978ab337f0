"""Recomputes a step's gradient and update on copies, as references for `--check`.

In: the recorded calls and backwards of a step, and the optimizer before and after it. Out: `Recomputed`, the gradient
that the optimizer should see; observations with `reference` and `result`; `Update`. The reader averages over ranks.

Three references: the sum of the gradients of the step's micro-batches; the gradient of all micro-batches as one batch;
and the optimizer's own formula on copies of its parameters, gradients and state. For the second, dropout is off on both
sides, because one batch draws other masks than its parts. Losses
outside of the model, such as contrastive ones, are not checked: the recorded gradient of the outputs is used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import placement
from ..gradient_history import written
from ..graph import loss_function, loss_nodes
from . import replay
from .replay import ModuleCall, NotRecomputable, connect, mapped, tensors
from .rows import batch_of, distance_between, exactly, first_difference, limit_of, quiet


@dataclass
class LossFactor:
    """A loss function of torch in one backward. `factor`: gradient that reaches its result (None until the backward).
    `targets`: number of targets that count. `mean`: whether it is a mean over them."""

    node: Any
    targets: Tensor | None
    mean: bool
    factor: Tensor | None = None

    def keep(self, gradients: Any) -> None:
        first = gradients[0] if gradients else None
        if isinstance(first, Tensor) and first.numel() == 1:
            self.factor = first.detach().clone()


@dataclass
class Backward:
    """A backward of the checked step. `outside`: parameters that the loss uses outside of calls."""

    number: int
    outside: dict[int, Tensor]
    factors: list[LossFactor]
    reason: str | None = None


def observed(calls: list[ModuleCall], losses: list[Tensor], number: int) -> Backward:
    """Record a backward before it is made."""
    try:
        outside, _ = connect(calls, losses, number)
    except NotRecomputable as error:
        return Backward(number, {}, [], str(error))
    factors = []
    for node in loss_nodes(losses[0]) if len(losses) == 1 else []:
        about = loss_function(node)
        targets = None if about.targets is None else about.targets[0].clone()
        row = LossFactor(node, targets, about.about["reduction"] == 1)
        node.register_prehook(row.keep)
        factors.append(row)
    return Backward(number, outside, factors)


@dataclass
class Recomputed:
    """Recomputed gradients of an optimizer's parameters, by id. `parts`: the same by backward, in order. `excluded`: id
    of a parameter -> why its gradient cannot be recomputed. `distance`: how far repeated outputs are from those of
    training."""

    parts: list[dict[int, Tensor]]
    excluded: dict[int, str]
    distance: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def total(self, weights: Sequence[float] | None = None) -> dict[int, Tensor]:
        """Return the sum over backwards, weighted."""
        total: dict[int, Tensor] = {}
        for part, weight in zip(self.parts, weights or [1.0] * len(self.parts), strict=True):
            for key, gradient in part.items():
                value = gradient if weight == 1.0 else gradient * weight
                total[key] = total[key] + value if key in total else value
        return total


def recomputed(calls: Sequence[ModuleCall], backwards: Sequence[Backward], parameters: Sequence[Tensor]) -> Recomputed:
    """Recompute the gradients of `parameters` from the calls that took part in the backwards."""
    trained = {id(p): p for p in parameters if p.requires_grad}
    excluded: dict[int, str] = {}
    reasons: list[str] = []
    for key, p in trained.items():
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
            excluded[key] = "it has a hook on its gradient"
        elif any(key in b.outside for b in backwards):
            excluded[key] = "the loss uses it outside of the model's calls"
    result = Recomputed([], excluded, reasons=reasons)
    for backward in backwards:
        part: dict[int, Tensor] = {}
        for call in calls:
            own = [p for p in call.module.parameters() if id(p) in trained]
            if not own or not (
                backward.number in call.seeds or any(backward.number in o.gradients for o in call.outputs)
            ):
                continue
            try:
                added = _of_call(call, backward, result)
            except NotRecomputable as error:
                reasons.append(str(error))
                excluded |= {id(p): str(error) for p in own}
                continue
            for key, gradient in added.items():
                if key in trained:
                    part[key] = part[key] + gradient if key in part else gradient
        result.parts.append(part)
    return result


def _of_call(call: ModuleCall, backward: Backward, result: Recomputed) -> dict[int, Tensor]:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    if any(call.versions.get(id(p)) != written(p) for p in call.module.parameters()):
        raise NotRecomputable("weights were written between the forward and the optimizer's step")
    added, distance = replay.gradients(replay.copied(call), call, backward.number)
    result.distance = max(result.distance, distance)
    if distance > replay.rounding_of(call):
        how = (
            "the compiled model draws different random numbers or rounds differently"
            if replay.is_compiled(call.module)
            else "the forward depends on more than its inputs, buffers and random numbers"
        )
        raise NotRecomputable(f"repeated outputs differ from those of training by {distance:.2g}: {how}")
    return added


Gradients = dict[int, Tensor]


def accumulation(calls: Sequence[ModuleCall], backwards: Sequence[Backward], own: set[int]) -> list[dict[str, Any]]:
    """Compare the gradient of all micro-batches with that of one batch of their examples. `own`: ids of the optimizer's
    parameters. Returns nothing for a step of one micro-batch."""
    parts = [(b, _call_of(b, calls, own)) for b in backwards]
    if len(parts) < 2:
        return []
    first = parts[0][1]
    if any(call.module is not first.module for _, call in parts):
        raise NotRecomputable("micro-batches go through different models")
    if any(isinstance(m, placement.BATCH_NORM) and m.training for m in first.module.modules()):
        raise NotRecomputable("batch norm: each micro-batch has its own statistics")
    for _, call in parts:
        if not replay.is_compiled(call.module):
            replay.require_reproduced(call)
    sizes = [batch_of(call, least=1) for _, call in parts]
    union = _joined([(call.args, call.kwargs) for _, call in parts], sizes)
    if exactly(*(replay.run(quiet(first, True), union, first, seed=seed) for seed in (1, 2))) > 0:
        raise NotRecomputable("the model draws random numbers with dropout off, or is not deterministic")
    separate: Gradients = {}
    outputs: list[list[Tensor]] = []
    for backward, call in parts:
        result, gradients = _gradients(call, (call.args, call.kwargs), _arrived(call, backward.number))
        outputs.append(result)
        separate = {k: separate[k] + g if k in separate else g for k, g in (separate | gradients).items() if k in own}
    seeds = _together([_arrived(call, b.number) for b, call in parts], outputs, sizes)
    together_outputs, together = _gradients(first, union, seeds)
    return [_compared(first, union, sizes, (outputs[0], together_outputs), (separate, together), own)]


def _call_of(backward: Backward, calls: Sequence[ModuleCall], own: set[int]) -> ModuleCall:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    rows = [c for c in calls if any(backward.number in o.gradients for o in c.outputs)]
    rows = [c for c in rows if any(id(p) in own for p in c.module.parameters())]
    if len(rows) != 1:
        raise NotRecomputable(f"a loss is computed from {len(rows)} calls of models")
    return rows[0]


def _arrived(call: ModuleCall, number: int) -> dict[int, Tensor]:
    fired = {i: row.gradients[number] for i, row in enumerate(call.outputs) if number in row.gradients}
    seeds = [i for i in call.seeds.get(number, []) if i in fired]
    if not seeds and len(fired) != 1:
        raise NotRecomputable("the loss depends on several outputs in an unknown way")
    return {i: fired[i] for i in seeds or fired}


def _joined(inputs: list[Any], sizes: list[int]) -> Any:
    flat = [list(tensors(each)) for each in inputs]
    if len({len(each) for each in flat}) != 1:
        raise NotRecomputable("micro-batches have different inputs")
    joined: dict[int, Tensor] = {}
    for same in zip(*flat, strict=True):
        one = same[0]
        rows = all(t.dim() and t.shape[0] == n for t, n in zip(same, sizes, strict=True))
        if rows and len({(t.shape[1:], t.dtype) for t in same}) == 1:
            joined[id(one)] = torch.cat([t.detach() for t in same]).requires_grad_(one.requires_grad)
        elif rows:
            raise NotRecomputable("micro-batches are padded to different lengths, and cannot be joined as they are")
        elif all(t.shape == one.shape and torch.equal(t, one) for t in same):
            joined[id(one)] = one
        else:
            raise NotRecomputable("an input without rows differs between micro-batches")
    values = [repr(list(_values(each))) for each in inputs]
    if len(set(values)) != 1:
        raise NotRecomputable("an option of the call differs between micro-batches")
    return mapped(inputs[0], lambda t: joined[id(t)])


def _values(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    elif not isinstance(value, Tensor):
        yield value


def _gradients(call: ModuleCall, inputs: Any, arrived: Mapping[int, Tensor]) -> tuple[list[Tensor], Gradients]:
    twin = quiet(call, True)
    result = replay.run(twin, inputs, call, gradients=True, seed=1)
    roots = [(result.floats[i], g) for i, g in arrived.items() if i < len(result.floats)]
    roots = [(t, g.to(t.dtype)) for t, g in roots if t.requires_grad]
    if len(roots) != len(arrived) or any(t.shape != g.shape for t, g in roots):
        raise NotRecomputable("the repeated forward returned different outputs")
    own = [p for p in replay.unwrapped(call.module).parameters() if p.requires_grad]
    twins = [p for p in twin.parameters() if p.requires_grad]
    parts = torch.autograd.grad([t for t, _ in roots], twins, [g for _, g in roots], allow_unused=True)
    named = {id(p): g.detach() for p, g in zip(own, parts, strict=True) if g is not None}
    return [t.detach() for t in result.floats], named


def _together(arrived: list[dict[int, Tensor]], outputs: list[list[Tensor]], sizes: list[int]) -> dict[int, Tensor]:
    if len({tuple(each) for each in arrived}) != 1:
        raise NotRecomputable("the losses of micro-batches are computed from different outputs")
    together = {}
    for i in arrived[0]:
        parts = [each[i] for each in arrived]
        if all(t.dim() and t.shape[0] == n for t, n in zip(parts, sizes, strict=True)):
            if len({t.shape[1:] for t in parts}) != 1:
                raise NotRecomputable("outputs of micro-batches have different shapes")
            together[i] = torch.cat(parts)
        elif all(t.numel() == 1 for t in parts):
            together[i] = torch.stack([t.reshape(()) for t in parts]).sum().reshape(outputs[0][i].shape)
        else:
            raise NotRecomputable("an output has no row for each example")
    return together


def _compared(
    call: ModuleCall,
    union: Any,
    sizes: list[int],
    outputs: tuple[list[Tensor], list[Tensor]],
    gradients: tuple[Gradients, Gradients],
    own: set[int],
) -> dict[str, Any]:
    separate, together = gradients
    keys = [key for key in together if key in own]
    ones = [separate[k].double().flatten() if k in separate else torch.zeros(together[k].numel()) for k in keys]
    vectors = torch.cat(ones), torch.cat([together[k].double().flatten() for k in keys])
    rows = [o for o in outputs[1] if o.dim() and o.shape[0] == sum(sizes)]
    observation: dict[str, Any] = {"reference": "accumulation", "micro": len(sizes), "loss": not rows}
    limit = max((limit_of(call, o) for o in outputs[0]), default=1e-4)
    observation["apart"] = distance = distance_between(*vectors)
    if distance <= 10 * limit:
        return observation | {"result": "same"}

    def differ(a: Tensor, b: Tensor) -> bool:
        if a.dim() and b.dim() and a.shape[0] == sizes[0] and b.shape == (sum(sizes), *a.shape[1:]):
            return distance_between(a, b[: sizes[0]]) > limit_of(call, a)
        return False

    pair = (quiet(call, True), (call.args, call.kwargs)), (quiet(call, True), union)
    module, operation = first_difference(*pair, call, differ, seed=1)
    return observation | {"result": "differs", "module": module, "operation": operation}


HALF = (torch.bfloat16, torch.float16)


@dataclass
class Update:
    """Expected results of a step. `twins`: id of a parameter -> copy with the formula's result; empty with `reason`."""

    before: dict[int, Tensor]
    twins: dict[int, Tensor]
    reason: str | None = None


def before_update(optimizer: Any, scale: Tensor | None = None) -> Update:
    """Compute the step on copies, before the optimizer makes it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = all(type(p) in (torch.nn.Parameter, Tensor) for p in parameters)
    weights = {id(p): p.detach().clone() for p in parameters} if plain else {}
    step = getattr(type(optimizer).step, "__wrapped__", None)  # without the hooks of all optimizers
    if not plain:
        return Update({}, {}, "parameters are sharded")
    if step is None or not type(optimizer).__module__.startswith("torch.optim"):
        return Update(weights, {}, f"{type(optimizer).__name__} is not an optimizer of torch")
    if type(optimizer).__name__ == "LBFGS" or scale is not None:
        return Update(weights, {}, "its step evaluates a closure, or divides by a loss scale")
    memo: dict[int, Any] = {}
    for p in parameters:
        twin = p.detach().clone().requires_grad_(p.requires_grad)
        twin.grad = None if p.grad is None else p.grad.detach().clone()
        memo[id(p)] = twin
    twins = {key: twin for key, twin in memo.items() if isinstance(twin, Tensor)}
    try:
        twin_optimizer = copy.deepcopy(optimizer, memo)
        with torch.no_grad():
            step(twin_optimizer)
    except Exception as error:  # a state may hold anything
        return Update(weights, {}, f"the step cannot be repeated: {type(error).__name__}: {str(error)[:200]}")
    return Update(weights, twins)


def after_update(optimizer: Any, expected: Update, names: dict[int, str]) -> dict[str, Any]:
    """Return the comparison after the step: `formula`: name -> difference from the formula's result, relative to the
    update (only differing ones); `lost`: name -> share of elements with a gradient that did not change."""
    formula: dict[str, float] = {}
    lost: dict[str, float] = {}
    elements = unchanged = 0
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in expected.before:
            continue
        name, old = names.get(id(p), f"?{i}"), expected.before[id(p)]
        twin = expected.twins.get(id(p))
        if twin is not None and not torch.equal(twin, p.detach()):
            size = max(float((twin.detach() - old).norm()), float((p.detach() - old).norm()))
            formula[name] = float((twin.detach() - p.detach()).norm()) / size if size else 0.0
        if p.dtype in HALF and p.grad is not None and not p.grad.is_sparse:
            nonzero = p.grad != 0
            count, same = int(nonzero.sum()), int((nonzero & (p.detach() == old)).sum())
            elements, unchanged = elements + count, unchanged + same
            if count:
                lost[name] = same / count
    return {
        "formula": {n: d for n, d in formula.items() if d > 1e-3},
        "reason": expected.reason,
        "lost": dict(sorted(lost.items(), key=lambda row: -row[1])[:8]),
        "lost_share": unchanged / elements if elements else None,
    }
