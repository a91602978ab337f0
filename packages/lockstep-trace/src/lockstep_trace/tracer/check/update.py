"""Reference for an update: the optimizer's own formula, on copies of its parameters, gradients and state.

In: an optimizer before and after its step. Out: how far the weights are from the formula, and how many elements of half
precision the update did not change.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@dataclass
class Update:
    """Expected results of a step. `twins`: id of a parameter -> copy with the formula's result; empty with `reason`."""

    before: dict[int, Tensor]
    twins: dict[int, Tensor]
    reason: str | None = None


def before(optimizer: Any, scale: Tensor | None = None) -> Update:
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


def after(optimizer: Any, expected: Update, names: dict[int, str]) -> dict[str, Any]:
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
