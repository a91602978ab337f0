"""The trial step refuses attention whose gradient need not repeat its bits, by the names of the kernels that ran."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lockstep.distributed.world import World
from lockstep.strategies.engines import attention_kernels
from support.harness import build_with_feed, tiny
from support.messages import raises

GOOD = """aten::scaled_dot_product_attention aten::_scaled_dot_product_flash_attention aten::mm
aten::_scaled_dot_product_flash_attention_backward aten::_flash_attention_forward aten::_flash_attention_backward
aten::_scaled_dot_product_efficient_attention aten::_efficient_attention_backward lockstep::attention_backward
aten::_scaled_dot_product_attention_math torch_attn::_varlen_attn flash_attn::_flash_attn_varlen_backward"""
BAD = """aten::_scaled_dot_product_cudnn_attention aten::_scaled_dot_product_cudnn_attention_backward
aten::_cudnn_attention_forward aten::_cudnn_attention_backward flash_attn_3::_flash_attn_backward
flash_attn::_flash_attn_backward(deterministic=False)
_flash_attn3_48fe103::fwd_attention aten::_scaled_dot_product_fused_attention_overrideable"""


def test_kernels_by_name() -> None:
    assert attention_kernels.refused(GOOD.split()) == []
    assert attention_kernels.refused([*BAD.split(), *GOOD.split()]) == sorted(BAD.split())


def test_kernels_within_other_operations_are_recorded() -> None:
    parts = [torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3)]
    with attention_kernels.recorded(torch.nn.Identity()) as names:
        scaled_dot_product_attention(*parts).sum().backward()
    inner = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert {"aten::scaled_dot_product_attention", inner, f"{inner}_backward"} <= names
    assert attention_kernels.refused(names) == []


def test_flash_attn_without_its_option_is_named() -> None:
    """A model of the user's may call it, which does not read the variable that transformers reads."""

    @torch.library.custom_op("of_a_test::_flash_attn_backward", mutates_args=())
    def backward(slope: torch.Tensor, dropout_p: float, deterministic: bool) -> torch.Tensor:
        return slope.clone()

    for deterministic in (True, False):
        with attention_kernels.recorded(torch.nn.Identity()) as names:
            backward(torch.ones(2), 0.1, deterministic)
        assert (f"{backward._qualname}(deterministic=False)" in names) != deterministic
        assert (backward._qualname in names) == deterministic


def test_only_the_first_forwards_are_recorded() -> None:
    """Each operation takes memory until the end of the step."""
    model = torch.nn.Identity()
    with attention_kernels.recorded(model) as names:
        for number in range(4):
            model(torch.ones(1))
            after = (torch.cos, torch.exp, torch.tan, torch.sin)[number]
            after(torch.ones(1))
    assert {"aten::cos", "aten::exp"} <= names
    assert not {"aten::tan", "aten::sin"} & names
    assert not model._forward_pre_hooks


def test_the_trial_step_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is not at hand: a CPU's kernel is taken off the list."""
    monkeypatch.setattr(attention_kernels, "REPEATING", re.compile(r"aten::scaled_dot_product_attention$"))
    monkeypatch.setattr(attention_kernels, "DEVICES", ("cpu",))
    run = tiny("strategy.name=single", "data.padding=batch", "model.config.attn_pdrop=0.0", "model.config.n_layer=1")
    _, strategy, feed = build_with_feed(run, World(run))
    with raises("LS4183", "model.attention", "_for_cpu"):
        strategy.dry_run(feed.longest())
    strategy.close()


def test_other_steps_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "recorded", None)
    for device, exact in (("cuda", False), ("cpu", True)):
        with attention_kernels.checked(torch.nn.Identity(), torch.device(device), exact, list):
            pass
