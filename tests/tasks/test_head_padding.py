"""A head with rows of zeros behind its own is the same function. Which products a GPU is given is counted in
tests/strategies/test_without_gpu.py."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lockstep.tasks.models import chunked_loss, head_padding

V, H = 397, 24


def sides(bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and gradients, float64: by torch, and padded."""
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(3, 5, H, dtype=torch.float64, generator=draw)
    weight = torch.randn(V, H, dtype=torch.float64, generator=draw)
    vector = torch.randn(V, dtype=torch.float64, generator=draw) if bias else None
    above = torch.randn(3, 5, V, dtype=torch.float64, generator=draw)
    results = []
    for missing in (None, 51):
        leaves = [t.clone().requires_grad_() for t in (states, weight, vector) if t is not None]
        given = (*leaves, None)[:3]
        logits = linear(*given) if missing is None else head_padding.product(*given, missing)
        logits.backward(above)
        results.append([logits.detach(), *(t.grad for t in leaves)])
    return results[0], results[1]


@pytest.mark.parametrize("bias", [True, False])
def test_the_function_is_the_same_and_so_are_its_shapes(bias: bool) -> None:
    plain, padded = sides(bias)
    assert len(plain) == len(padded) == 3 + bias
    for one, other in zip(plain, padded, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_heads_are_padded_on_gpus_in_half_precision() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert head_padding.missing_rows(50257, torch.bfloat16, gpu) == 47
    assert head_padding.missing_rows(50257, torch.float16, gpu) == 47
    assert head_padding.missing_rows(50257, torch.float32, gpu) == 0
    assert head_padding.missing_rows(50257, torch.bfloat16, cpu) == 0
    assert head_padding.missing_rows(128256, torch.bfloat16, gpu) == 0
    assert head_padding.missing_rows(50264, torch.bfloat16, gpu) == 0  # a multiple of 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(H, V)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("autocast", [True, False])
def test_a_model_on_a_cpu_computes_the_bits_it_had_and_keeps_its_weights(autocast: bool) -> None:
    model = Model()
    installed = copy.deepcopy(model)
    head_padding.install(installed)
    states = torch.randn(4, H)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(installed.head(states), model.head(states))
    assert installed.state_dict().keys() == model.state_dict().keys()
    other = copy.deepcopy(installed)  # computes by its own weights
    with torch.no_grad():
        other.head.weight.zero_()
        other.head.bias.zero_()
    assert not other.head(states).any()
    assert installed.head(states).any()


@pytest.mark.parametrize("autocast", [True, False])
def test_padded_as_on_a_gpu_a_model_gives_logits_to_rounding(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    installed = copy.deepcopy(model)
    head_padding.install(installed)
    monkeypatch.setattr(head_padding, "missing_rows", lambda rows, dtype, device: -rows % head_padding.MULTIPLE)
    states, results = torch.randn(4, H), []
    for each in (model, installed):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = each.head(states)
        logits.float().square().sum().backward()
        results.append([logits.detach(), each.head.weight.grad, each.head.bias.grad])
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.allclose(
            one.float(), other.float(), rtol=2e-2 if autocast else 1e-5, atol=2e-2 if autocast else 1e-5
        )


@pytest.mark.parametrize("bias", [True, False])
def test_the_loss_in_chunks_is_the_same(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    states, weight = torch.randn(20, H, generator=draw), torch.randn(V, H, generator=draw) / 4
    vector = torch.randn(V, generator=draw) if bias else None
    rows, labels = torch.arange(3, 17), torch.randint(0, V, (14,), generator=draw)
    results = []
    for padded in (False, True):
        if padded:
            monkeypatch.setattr(head_padding, "missing_rows", lambda rows, dtype, device: -rows % 64)
        leaves = [None if t is None else t.clone().requires_grad_() for t in (states, weight, vector)]
        how = (chunked_loss.Finish(), 5, 0.0, torch.bfloat16)
        loss, each = chunked_loss._Loss.apply(leaves[0], rows, labels, leaves[1], leaves[2], how)
        loss.backward()
        results.append([loss.detach(), each, *(t.grad for t in leaves if t is not None)])
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)
