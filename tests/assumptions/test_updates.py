"""Assumptions about torch's optimizers, clipping and learning rate schedules."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from support.assumed import rests_on_it

FUSED = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}, "Adagrad": {}}


def updated(kind: str, weight: Tensor, steps: int = 3, **options: Any) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **options)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(weight.shape, generator=drawn).to(weight.dtype)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("kind", FUSED)
@rests_on_it(
    "src/lockstep/strategies/optimizers/adamw.py",
    "src/lockstep/strategies/optimizers/sgd.py",
)
def test_fused_kernels_agree_with_plain_ones_in_float32(kind: str) -> None:
    """Fused AdamW, Adam, SGD and Adagrad update float32 weights like plain ones within rounding, at odd sizes too."""
    weight = torch.linspace(-1, 1, 33)
    fused, plain = updated(kind, weight, fused=True, **FUSED[kind]), updated(kind, weight, **FUSED[kind])
    assert torch.allclose(fused, plain, rtol=1e-5, atol=1e-6)


@rests_on_it("src/lockstep/strategies/exact/stepper.py", "src/lockstep/strategies/optimizers/sgd.py")
def test_fused_sgd_does_not_move_bfloat16() -> None:
    """torch's fused SGD does not update bfloat16 weights on a CPU before 2.14. lockstep widens them to float32
    first."""
    moved = updated("SGD", torch.zeros(32, dtype=torch.bfloat16), fused=True)
    assert bool(moved.any()) is (tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14))


@rests_on_it("src/lockstep/strategies/optimizers/adamw.py", "src/lockstep/plain/train.py")
def test_adamw_decays_before_it_updates() -> None:
    """AdamW multiplies a weight by 1 - lr * decay before its update; the first update has magnitude lr."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, eps=0)
    weight.grad = torch.full((1,), 7.0)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.1 * 0.5 - 0.1)


@rests_on_it("src/lockstep/strategies/optimizers/sgd.py", "src/lockstep/plain/train.py")
def test_sgd_adds_weight_decay_to_the_gradient() -> None:
    """SGD adds decay * weight to the gradient before momentum, which starts as that sum."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.5, momentum=0.9)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].item() == 1.5
    assert weight.item() == pytest.approx(1 - 0.15)


@rests_on_it("src/lockstep/strategies/exact/stepper.py", "src/lockstep/strategies/engines/zero_steps.py")
def test_a_weight_without_gradient_is_left_alone() -> None:
    """An optimizer skips a weight whose .grad is None: no decay, no state. With zero gradients, weights decay and the
    step counts."""
    without, zeros = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([without, zeros], lr=0.1, weight_decay=0.5)
    zeros.grad = torch.zeros(1)
    optimizer.step()
    assert (without.item(), len(optimizer.state[without])) == (1.0, 0)
    assert zeros.item() == pytest.approx(0.95)
    assert optimizer.state[zeros]["step"].item() == 1


@rests_on_it(
    "src/lockstep/strategies/exact/stepper.py", "src/lockstep/checkpoint/shard_files.py", "src/lockstep/plain/train.py"
)
def test_the_state_of_an_optimizer_is_by_number() -> None:
    """state_dict numbers parameters across all groups in order; load_state_dict matches by number, not by name."""
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [b]}, {"params": [a]}])
    a.grad, b.grad = torch.ones(1), torch.ones(2)
    optimizer.step()
    assert [len(state["exp_avg"]) for _, state in sorted(optimizer.state_dict()["state"].items())] == [2, 1]


@rests_on_it("src/lockstep/strategies/optimizers/adamw.py")
def test_functional_adamw_and_found_inf() -> None:
    """The function adamw with fused=True and found_inf None has the bits of the class. With found_inf 1 it changes
    neither weights, moments nor steps; with 0 it updates. It writes its states in place."""
    from torch.optim.adamw import adamw

    options: dict[str, Any] = {"amsgrad": False, "beta1": 0.9, "beta2": 0.99, "lr": 0.1, "weight_decay": 0.3}
    options |= {"eps": 1e-8, "maximize": False, "fused": True}
    start, gradient = torch.linspace(-1, 1, 5), torch.linspace(2, -3, 5)
    one = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([one], lr=0.1, betas=(0.9, 0.99), weight_decay=0.3, fused=True)
    weight, first, second, step = start.clone(), torch.zeros(5), torch.zeros(5), torch.zeros(())

    def update(found_inf: torch.Tensor | None) -> None:
        adamw([weight], [gradient.clone()], [first], [second], [], [step], found_inf=found_inf, **options)

    for number, found_inf in ((1, None), (1, torch.ones(())), (2, torch.zeros(()))):
        if found_inf is None or not found_inf:
            one.grad = gradient.clone()
            optimizer.step()
        update(found_inf)
        assert step.item() == number
        assert torch.equal(weight, one.detach())
        state = optimizer.state[one]
        assert torch.equal(first, state["exp_avg"])
        assert torch.equal(second, state["exp_avg_sq"])


@rests_on_it("src/lockstep/plain/train.py", "src/lockstep/strategies/exact/update.py")
def test_clipping_multiplies_by_at_most_one() -> None:
    """clip_grad_norm_ returns the norm before clipping and multiplies by limit / (norm + 1e-6), or by 1 if the norm is
    below the limit."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert nn.utils.clip_grad_norm_([weight], 1.0).item() == 5.0
    assert weight.grad.tolist() == pytest.approx([3 / (5 + 1e-6), 4 / (5 + 1e-6)])
    before = weight.grad.clone()
    nn.utils.clip_grad_norm_([weight], 2.0)
    assert torch.equal(before, weight.grad)


@rests_on_it("src/lockstep/strategies/exact/update.py", "src/lockstep/plain/train.py")
def test_clipping_a_gradient_that_is_not_finite_makes_all_nan() -> None:
    """clip_grad_norm_ does not raise for a NaN and makes every gradient NaN, so lockstep checks the norm first."""
    good, bad = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    good.grad, bad.grad = torch.ones(1), torch.full((1,), math.nan)
    assert nn.utils.clip_grad_norm_([good, bad], 1.0).isnan()
    assert good.grad.isnan()


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_global_step_hooks_see_every_optimizer() -> None:
    """register_optimizer_step_pre_hook and _post_hook run around step() of each torch optimizer, with its arguments."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(f"before {type(optimizer).__name__}")),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(f"after {type(optimizer).__name__}")),
    ]
    try:
        for kind in ("SGD", "AdamW"):
            getattr(torch.optim, kind)([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["before SGD", "after SGD", "before AdamW", "after AdamW"]


@rests_on_it("src/lockstep/config/schedules.py", "packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_a_schedule_sets_the_first_rate_when_it_is_made() -> None:
    """LambdaLR sets the rate of step 0 on construction, and each step() sets the rate of the next step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1 / (step + 2))
    rates = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    schedule.step()
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, pytest.approx(1 / 3)]


@rests_on_it("src/lockstep/lab/import_config/loops.py")
def test_a_linear_warmup_begins_at_a_third() -> None:
    """LinearLR starts at a third of the rate and reaches the full rate after total_iters, by default 5."""
    known = inspect.signature(LinearLR).parameters
    assert (known["start_factor"].default, known["end_factor"].default, known["total_iters"].default) == (1 / 3, 1.0, 5)


@rests_on_it("src/lockstep/config/schedules.py", "src/lockstep/plain/train.py")
def test_defaults_of_one_cycle() -> None:
    """By default OneCycleLR rises from 1/25 of the rate over 0.3 of the steps, and falls to that start divided by 1e4,
    along a cosine."""
    known = inspect.signature(torch.optim.lr_scheduler.OneCycleLR).parameters
    assert (known["pct_start"].default, known["div_factor"].default, known["final_div_factor"].default) == (
        0.3,
        25,
        1e4,
    )
    assert known["anneal_strategy"].default == "cos"


@rests_on_it(
    "src/lockstep/config/schedules.py", "src/lockstep/lab/import_config/loops.py", "src/lockstep/plain/train.py"
)
def test_defaults_of_optimizers() -> None:
    """Defaults: AdamW decays by 0.01 with betas 0.9, 0.999 and eps 1e-8; Adam and SGD do not decay; SGD has no
    momentum."""
    usual = {
        kind: {name: each.default for name, each in inspect.signature(getattr(torch.optim, kind)).parameters.items()}
        for kind in ("AdamW", "Adam", "SGD")
    }
    assert (usual["AdamW"]["weight_decay"], usual["AdamW"]["betas"], usual["AdamW"]["eps"]) == (
        0.01,
        (0.9, 0.999),
        1e-8,
    )
    assert (usual["AdamW"]["lr"], usual["Adam"]["weight_decay"]) == (1e-3, 0)
    assert (usual["SGD"]["weight_decay"], usual["SGD"]["momentum"], usual["SGD"]["lr"]) == (0, 0, 1e-3)


@rests_on_it("src/lockstep/strategies/exact/training_state.py")
def test_an_average_begins_with_a_copy() -> None:
    """AveragedModel copies the weights at its first update, and holds their mean after several."""
    layer = nn.Linear(1, 1, bias=False)
    average = torch.optim.swa_utils.AveragedModel(layer)
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(layer.weight, value)
        average.update_parameters(layer)
    assert average.module.weight.item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("kind", "shape", "names"),
    [
        ("Adafactor", (3, 4), {"step": (), "row_var": (3, 1), "col_var": (1, 4)}),
        ("Adafactor", (2, 3, 4), {"step": (), "row_var": (2, 3, 1), "col_var": (2, 1, 4)}),
        ("Adafactor", (4,), {"step": (), "variance": (4,)}),
        ("Muon", (3, 4), {"momentum_buffer": (3, 4)}),
    ],
)
@rests_on_it("src/lockstep/strategies/optimizers/adafactor.py", "src/lockstep/strategies/optimizers/muon.py")
def test_a_state_has_these_names_and_shapes(kind: str, shape: tuple[int, ...], names: dict[str, Any]) -> None:
    """Adafactor keeps the mean squares of rows and columns of each matrix (its last two dimensions), and of all
    elements of other weights. Muon keeps a momentum buffer and no step."""
    weight = nn.Parameter(torch.ones(shape))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    weight.grad = torch.ones(shape)
    optimizer.step()
    assert {name: tuple(held.shape) for name, held in optimizer.state[weight].items()} == names


@rests_on_it("src/lockstep/strategies/optimizers/sgd.py", "src/lockstep/strategies/optimizers/optimizer.py")
def test_functional_sgd_and_preset_states() -> None:
    """The function sgd with fused=True adds into the momentum buffers passed to it, zeros at the first step too,
    accepts None without momentum, and changes nothing with found_inf 1. An optimizer class uses a state stored in
    `state` under a weight, and writes into its tensors."""
    from torch.optim.sgd import sgd

    options: dict[str, Any] = {"fused": True, "weight_decay": 0.0, "lr": 0.1, "dampening": 0.0}
    options |= {"nesterov": False, "maximize": False}
    weight, buffer, gradient = torch.ones(3), torch.zeros(3), torch.full((3,), 2.0)
    sgd([weight], [gradient.clone()], [buffer], found_inf=None, momentum=0.9, **options)
    once = weight.clone()
    assert torch.equal(once, torch.ones(3) - 0.1 * gradient)
    assert torch.equal(buffer, gradient)
    sgd([weight], [gradient.clone()], [buffer], found_inf=torch.ones(()), momentum=0.9, **options)
    assert torch.equal(weight, once)
    assert torch.equal(buffer, gradient)
    plain = torch.ones(3)
    sgd([plain], [gradient.clone()], [None], found_inf=None, momentum=0.0, **options)
    assert torch.equal(plain, once)
    for kind, shape, names in (
        (torch.optim.Muon, (2, 3), {"momentum_buffer": (2, 3)}),
        (torch.optim.Adafactor, (2, 3), {"step": (), "row_var": (2, 1), "col_var": (1, 3)}),
    ):
        matrix = torch.ones(shape)
        held = {name: torch.zeros(size) for name, size in names.items()}
        before = dict(held)
        optimizer: Any = kind([matrix], lr=0.1)  # type: ignore[operator]
        matrix.grad = torch.ones(shape)
        optimizer.state[matrix] = held
        optimizer.step()
        assert held.keys() == before.keys()
        assert all(held[name] is tensor and tensor.any() for name, tensor in before.items())


@rests_on_it("src/lockstep/strategies/exact/update.py", "src/lockstep/strategies/engines/hooked_ddp.py")
def test_foreach_with_scalar_tensors_and_other_dtypes() -> None:
    """torch._foreach_mul_ with a one-element tensor gives the bits of mul_ with it, at odd sizes too. _foreach_copy_
    rounds as copy_ does."""
    factor = torch.tensor(0.3)
    many = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 17, 1023)]
    ones = [each * factor for each in many]
    torch._foreach_mul_(many, factor)
    assert all(torch.equal(a, b) for a, b in zip(many, ones, strict=True))
    narrow = [torch.zeros_like(each, dtype=torch.bfloat16) for each in many]
    torch._foreach_copy_(narrow, many)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow, many, strict=True))
