"""Autograd saves names and offsets of the weights that ZeRO's stage 3 gathers and frees; without DeepSpeed."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lockstep.strategies.engines.zero_graph import SavedByName, keep_sums


class Fused(nn.Module):
    """Two layers in one weight, as attention stores keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)))

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight[:3]) * linear(inputs, self.weight[3:])


class Mapping(OrderedDict[str, Any]):
    """Stand-in for DeepSpeed's mapping, which holds a module's weights at stage 3."""


def gradients(model: Fused, saving: Any = None) -> tuple[Tensor, Tensor]:
    inputs = torch.ones(2, 4, requires_grad=True)
    if saving is None:
        output = model(inputs)
    else:
        with saving:
            output = model(inputs)
    model.zero_grad()
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None
    assert model.weight.grad is not None
    return inputs.grad, model.weight.grad


def test_slices_of_a_weight_are_read_in_place() -> None:
    plain, model = gradients(Fused()), Fused()
    model._parameters = Mapping(model._parameters)
    weight: Any = model.weight
    weight.ds_id, weight.ds_status = 0, SimpleNamespace(name="AVAILABLE")
    registry: Any = {"_PartitionedParameterCoordinator__inflight_param_registry": {}}
    saving = SavedByName(model, SimpleNamespace(**registry))
    kept: list[Any] = []
    pack = saving._pack
    saving.pack_hook = lambda tensor: kept.append(pack(tensor)) or kept[-1]  # type: ignore[func-returns-value,method-assign]
    for own, of_torch in zip(gradients(model, saving), plain, strict=True):
        assert torch.equal(own, of_torch)
    # saved as an offset into the weight, not as numbers
    assert [each[-1] for each in kept if isinstance(each, tuple)] == [0, 12]


def test_a_prefetched_weight_is_awaited_where_it_is_read() -> None:
    waited: list[str] = []
    model = Fused()
    model._parameters = Mapping(model._parameters)
    arriving = {model.weight: SimpleNamespace(wait=lambda: waited.append("weight"))}
    registry: Any = {"_PartitionedParameterCoordinator__inflight_param_registry": arriving}
    SavedByName(model, SimpleNamespace(**registry))
    assert waited == []
    assert model.weight is model.weight
    assert (waited, arriving) == (["weight"], {})  # once


class Node(torch.autograd.Function):
    """Stand-in for DeepSpeed's autograd node, which runs code in backward."""

    heard = 0

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        Node.heard += 1
        return gradients[0]


class Norm(nn.Module):
    """A norm with a weight, which uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * inputs.square().mean() * self.weight


def test_an_input_that_is_used_twice_gets_no_node() -> None:
    """A node would add the input's two gradients before a third one, where torch adds one after another."""
    model: Any = nn.Sequential(Norm(), nn.Linear(4, 4))
    for module in model:
        module.pre_bwd_fn = module.post_bwd_fn = Node
    keep_sums(model)
    assert model[1].post_bwd_fn is Node  # control: a linear layer uses its input once
    inputs = torch.ones(2, 4, requires_grad=True)
    assert model[0].post_bwd_fn.apply(inputs) is inputs
    (model[0](inputs) + inputs).sum().backward()
    assert Node.heard == 1
