"""Assumptions about torch."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from support.assumed import rests_on_it

COUNTS = {  # optimizer, options -> whether a step with zero gradients changes later steps
    "AdamW": ({}, True),
    "NAdam": ({}, True),
    "RAdam": ({}, True),
    "Adamax": ({}, True),
    "SGD": ({"momentum": 0.9, "dampening": 0.5}, True),
    "SGD without dampening": ({"momentum": 0.9}, False),
    "RMSprop": ({}, False),
    "Adagrad": ({}, False),
}


@pytest.mark.parametrize("kind", COUNTS)
@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_state_made_by_the_checkpoint_helpers_counts_as_a_step(kind: str) -> None:
    """get_optimizer_state_dict of a new optimizer makes a step with zero gradients and learning rate 0. AdamW, NAdam,
    RAdam, Adamax and SGD with dampening count that step; SGD with momentum, RMSprop and Adagrad do not."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    options, counts = COUNTS[kind]

    def trained(helped: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(3, 1, bias=False)
        optimizer = getattr(torch.optim, kind.split()[0])(layer.parameters(), lr=0.1, **options)
        if helped:
            get_optimizer_state_dict(layer, optimizer)
        for _ in range(2):
            layer(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach().clone()

    assert torch.equal(trained(False), trained(True)) is not counts


@rests_on_it(
    "src/lockstep/distributed/randomness.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/models/inference.py",
    "src/lockstep/tasks/models/padding.py",
    "src/lockstep/tasks/models/small_models.py",
    "src/lockstep/tasks/modules/loss_probe.py",
)
def test_manual_seed_determines_dropout() -> None:
    """Dropout draws only from torch's default generator; the same seed gives the same mask."""
    random.seed(1)
    np.random.seed(1)
    masks = []
    for _ in range(2):
        torch.manual_seed(5)
        masks.append(nn.functional.dropout(torch.ones(64), 0.5, training=True))
        random.random(), np.random.random()
    assert torch.equal(*masks)


@rests_on_it("src/lockstep/strategies/exact/training_state.py", "src/lockstep/strategies/exact/gradient_sum.py")
def test_foreach_has_the_bits_of_single_operations() -> None:
    """torch._foreach_add_ and _foreach_mul_ give the bits of add_ and mul_ on each tensor, at odd sizes too."""
    sizes = (1, 3, 17, 1023)
    left, right = [torch.randn(n) for n in sizes], [torch.randn(n) for n in sizes]
    ones = [(a + b).mul(0.3) for a, b in zip(left, right, strict=True)]
    torch._foreach_add_(left, right)
    torch._foreach_mul_(left, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(left, ones, strict=True))


@rests_on_it("src/lockstep/strategies/exact/stepper.py")
def test_adamw_updates_slices_like_the_whole_tensor() -> None:
    """AdamW updates each element as in the whole tensor if the tensor is split anywhere into rows of 16 elements."""
    torch.manual_seed(0)
    whole, gradient = torch.randn(160), torch.randn(160)

    def moved(cuts: list[int]) -> torch.Tensor:
        parts = [nn.Parameter(part.clone()) for part in whole.split(cuts)]
        optimizer = torch.optim.AdamW(parts, lr=0.1, weight_decay=0.1)
        for _ in range(3):
            for part, its in zip(parts, gradient.split(cuts), strict=True):
                part.grad = its.clone()
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    assert torch.equal(moved([160]), moved([16, 32, 112]))
    assert torch.equal(moved([160]), moved([16] * 10))


@rests_on_it("src/lockstep/strategies/exact/gradient_sum.py")
def test_unique_is_sorted_and_index_add_is_in_order() -> None:
    """torch.unique sorts, and index_add_ on a CPU adds in index order."""
    rows, place = torch.unique(torch.tensor([5, 1, 5, 3]), return_inverse=True)
    assert rows.tolist() == [1, 3, 5]
    assert place.tolist() == [2, 0, 2, 1]
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    total = torch.zeros(1).index_add_(0, torch.zeros(4, dtype=torch.long), values)
    expected = torch.zeros(())
    for value in values:
        expected = expected + value
    assert total.item() == expected.item()


@rests_on_it(
    "src/lockstep/tasks/language_modeling.py",
    "src/lockstep/plain/losses.py",
    "src/lockstep/tasks/cross_entropy.py",
    "src/lockstep/tasks/models/chunked_loss.py",
    "src/lockstep/tasks/models/config_checks.py",
    "src/lockstep/tasks/modules/loss_probe.py",
    "src/lockstep/tasks/question_answering.py",
)
def test_cross_entropy_without_targets() -> None:
    """cross_entropy with only -100 labels is 0 with reduction="sum" and NaN with "mean"; its gradient is 0."""
    logits = torch.randn(4, 8, requires_grad=True)
    labels = torch.full((4,), -100)
    total = cross_entropy(logits, labels, reduction="sum")
    total.backward()
    assert total.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    assert cross_entropy(logits.detach(), labels).isnan()


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@rests_on_it("src/lockstep/tasks/models/padding.py", "src/lockstep/tasks/models/masks.py")
def test_masked_keys_do_not_affect_attention(kind: torch.dtype) -> None:
    """A masked key changes no bit of the attention output, whatever finite values it holds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    shown = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    shown[..., 4:] = False
    mask = shown if kind == torch.bool else torch.zeros(1, 1, 6, 6).masked_fill(~shown, torch.finfo(kind).min)
    before = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    k[..., 4:, :], v[..., 4:, :] = 100.0, -100.0
    assert torch.equal(before, scaled_dot_product_attention(q, k, v, attn_mask=mask))


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_a_checkpoint_loads_by_name_and_widens(tmp_path: Path) -> None:
    """torch.distributed.checkpoint raises if the checkpoint lacks a requested name, ignores names that are not
    requested, and casts to the dtype of the target tensor."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    kept = {"a": torch.tensor([1.0, 1 / 3]), "b": torch.ones(2)}
    dcp.save(kept, checkpoint_id=str(tmp_path), no_dist=True)
    into: dict[str, Any] = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(into, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(into["a"], kept["a"].bfloat16())
    with pytest.raises((RuntimeError, CheckpointException), match="c"):
        dcp.load({"c": torch.zeros(2)}, checkpoint_id=str(tmp_path), no_dist=True)


@rests_on_it("src/lockstep/strategies/exact/stepper.py")
def test_load_state_dict_takes_the_saved_options() -> None:
    """Optimizer.load_state_dict overwrites lr, foreach and fused of the new optimizer, and casts moments, but not
    `step`, to the parameter's dtype."""
    first = torch.optim.AdamW([nn.Parameter(torch.ones(4))], lr=0.1, fused=True)
    first.param_groups[0]["params"][0].grad = torch.ones(4)
    first.step()
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    second = torch.optim.AdamW([parameter], lr=0.5, foreach=True)
    second.load_state_dict(first.state_dict())
    assert (second.param_groups[0]["lr"], second.param_groups[0]["fused"]) == (0.1, True)
    assert second.state[parameter]["exp_avg"].dtype == torch.bfloat16
    assert second.state[parameter]["step"].dtype == torch.float32


@rests_on_it("src/lockstep/training/data_loader.py", "src/lockstep/distributed/randomness.py")
def test_a_loader_draws_from_the_default_generator() -> None:
    """Each iter() of a DataLoader draws from torch's default generator, even without workers and shuffling."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), batch_size=2))
    assert not torch.equal(before, torch.get_rng_state())


@rests_on_it("src/lockstep/strategies/exact/update.py")
def test_foreach_norm_is_summed_in_double() -> None:
    """torch._foreach_norm with dtype float64 sums squares in float64: small values next to a large one count."""
    (norm,) = torch._foreach_norm([torch.tensor([1e4, *[1e-2] * 1000])], 2, torch.float64)
    wide = torch.tensor([1e4, *[1e-2] * 1000]).double().square().sum().sqrt()
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(wide.item(), rel=1e-14)


@rests_on_it("src/lockstep/distributed/torch_internals.py")
def test_torch_creates_gloo_groups_by_calling_process_group_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch creates a gloo group by calling distributed_c10d's ProcessGroupGloo with store, rank, size, `timeout`, and
    the group's options as keywords (`enable_reconfigure` from 2.14 on), and tests the result with isinstance."""
    module: Any = torch.distributed.distributed_c10d
    original, calls = module.ProcessGroupGloo, []

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

    class Noted(original, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, *words: Any, **named: Any) -> Any:
            calls.append((words, named))
            return original(*words, **named)

    monkeypatch.setattr(module, "ProcessGroupGloo", Noted)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.destroy_process_group()
    ((store, *place), named), *_ = calls
    assert isinstance(store, torch.distributed.Store)
    assert place == [0, 1]
    timeout = named.pop("timeout")
    assert timeout.total_seconds() > 0
    assert all(hasattr(original._Options(), name) for name in named)


@rests_on_it("src/lockstep/distributed/torch_internals.py")
def test_objects_are_sent_with_the_modules_pickler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed pickles each object that it sends by distributed_c10d's `_pickler` and unpickles it by
    `_unpickler`, looked up at each call."""
    import pickle

    module: Any = torch.distributed.distributed_c10d
    calls: list[str] = []

    def pickler(file: Any) -> Any:
        calls.append("pickle")
        return pickle.Pickler(file)

    def unpickler(file: Any) -> Any:
        calls.append("unpickle")
        return pickle.Unpickler(file)

    monkeypatch.setattr(module, "_pickler", pickler)
    monkeypatch.setattr(module, "_unpickler", unpickler)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        gathered: list[Any] = [None]
        torch.distributed.all_gather_object(gathered, {"a": 1})
        message: list[Any] = ["b"]
        torch.distributed.broadcast_object_list(message)
        assert gathered == [{"a": 1}]
        assert calls[:2] == ["pickle", "unpickle"]
        assert calls[2] == "pickle"
    finally:
        torch.distributed.destroy_process_group()


@rests_on_it("src/lockstep/distributed/torch_internals.py")
def test_variable_length_attention_does_not_choose_cudnn() -> None:
    """torch.nn.attention.varlen calls `_should_use_cudnn` to choose cuDNN's kernel. Up to torch 2.13 it returns False.
    In 2.14 it calls `_can_use_cudnn`, and returns True for devices of capability 9 and 10."""
    from torch.nn.attention import varlen

    assert inspect.signature(varlen._should_use_cudnn).parameters.keys() == {"device_index"}
    if hasattr(varlen, "_can_use_cudnn"):
        assert "if not query.is_cuda or not _should_use_cudnn(" in inspect.getsource(varlen._can_use_cudnn)
    else:
        assert varlen._should_use_cudnn(0) is False
    source = inspect.getsource(varlen)
    calls = [part for part in source.split("\n\n\n") if "torch.ops.aten._cudnn_attention" in part]
    assert len(calls) == 2  # forward and backward
    assert all("if use_cudnn:" in part and "_use_cudnn(" in part for part in calls)


@rests_on_it("src/lockstep/distributed/portable.py", "src/lockstep/distributed/world.py")
def test_switches_of_kernels_on_a_cpu() -> None:
    """mkldnn.set_flags(False) turns mkldnn off and returns the old flags, which it accepts again. enable_flash_sdp also
    applies on a CPU: when off, scaled_dot_product_attention uses the math backend (0 of _fused_sdp_choice) in place of
    flash (1). set_fastpath_enabled(False) turns off TransformerEncoderLayer's fused kernel in evaluation."""
    flags = torch.backends.mkldnn.set_flags(False)
    try:
        assert not torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.set_flags(*flags)
    assert torch.backends.mkldnn.enabled is flags[0]
    x = torch.randn(1, 2, 4, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fused: list[int] = []
    library = torch.library.Library("aten", "IMPL")
    library.impl("_transformer_encoder_layer_fwd", lambda x, *_, **__: fused.append(1) or x, "CPU")
    choices, calls = [], []
    try:
        for on in (True, False):
            torch.backends.cuda.enable_flash_sdp(on)
            torch.backends.mha.set_fastpath_enabled(on)
            choices.append(torch._fused_sdp_choice(x, x, x))
            with torch.no_grad():
                layer(x[0])
            calls.append(len(fused))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.mha.set_fastpath_enabled(True)
        del library
    assert (choices, calls) == ([1, 0], [1, 1])


@rests_on_it("src/lockstep/distributed/portable.py", "src/lockstep/distributed/hardware.py")
def test_names_of_cpu_capabilities() -> None:
    """get_cpu_capability returns one of these words; DEFAULT and others name other kernels. torch.cpu.get_capabilities
    has avx2 and fma3 as bool on x86. numpy's show_config lists the instruction sets in use as "found"."""
    import platform

    assert torch.backends.cpu.get_cpu_capability() in (
        "DEFAULT",
        "AVX2",
        "AVX512",
        "NO AVX",
        "VSX",
        "SVE256",
        "Z VECTOR",
    )
    if platform.machine() == "x86_64":
        able = torch.cpu.get_capabilities()
        assert {type(able[name]) for name in ("avx2", "fma3")} == {bool}
    listed: Any = np.show_config(mode="dicts")
    assert all(isinstance(name, str) for name in listed["SIMD Extensions"].get("found", []))
    assert "baseline" in listed["SIMD Extensions"]


@rests_on_it("src/lockstep/distributed/portable.py")
def test_an_array_over_a_tensor_leaves_its_storage_resizable() -> None:
    """np.from_dlpack of a detached tensor shares its memory (read-only before numpy 2.1) and leaves its storage
    resizable. After Tensor.numpy the storage cannot be resized."""
    tensor = torch.ones(4)
    array = np.from_dlpack(tensor.detach())  # type: ignore[arg-type]
    tensor[0] = 5
    assert array[0] == 5
    assert tensor.untyped_storage().resizable()
    tensor.numpy()
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.untyped_storage().resize_(0)


@rests_on_it("src/lockstep/distributed/portable.py")
def test_functions_used_by_portable_kernels() -> None:
    """np.sqrt rounds as IEEE 754 does. frexp gives a mantissa of at least 1/2 and below 1, also for denormal numbers,
    and keeps 0, inf and NaN. exp2 of the imaginary number x / log 2 is cos x + i sin x. gelu is x (1 + erf(x / sqrt 2))
    / 2 by default. np.matmul can write into a slice passed as `out`. An operation's overloads have names, the first one
    "default"."""
    from decimal import Context, Decimal

    numbers = np.array([2.0, 3.0, 1e-300, 7.7, 5e-324])
    exact = [float(Decimal(float(x)).sqrt(Context(60))) for x in numbers]
    assert np.sqrt(numbers, out=np.empty(5)).tolist() == exact
    wide = torch.tensor([0.0, 1.0, 0.75, 5e-324, float("inf"), float("nan")], dtype=torch.float64)
    mantissa, exponent = torch.frexp(wide)
    assert mantissa[:4].tolist() == [0.0, 0.5, 0.75, 0.5]
    assert exponent[:4].tolist() == [0, 1, 0, -1073]
    assert (mantissa[4].isinf().item(), mantissa[5].isnan().item()) == (True, True)
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    turned = torch.exp2(torch.complex(torch.zeros_like(x), x / np.log(2)))
    assert torch.allclose(turned, torch.complex(x.cos(), x.sin()), rtol=1e-14, atol=1e-15)
    assert torch.allclose(nn.functional.gelu(x), x * (1 + torch.erf(x / 2**0.5)) / 2, rtol=1e-14, atol=1e-15)
    out = np.zeros((3, 2))
    np.matmul(np.eye(2), np.ones((2, 2)), out=out[1:])
    assert out.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert torch.ops.aten.cholesky_solve.overloads() == ["default", "out"]


@rests_on_it("src/lockstep/distributed/randomness.py")
def test_masks_of_dropout_are_drawn_by_one_operation(recwarn: pytest.WarningsRecorder) -> None:
    """Dropout and attention on a CPU draw their masks by `bernoulli_.float`, with the probability to keep and without a
    generator. A kernel registered for it is called instead, until its library is destroyed."""
    calls: list[Any] = []

    def bernoulli(tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
        calls.append((p, generator, tuple(tensor.shape)))
        return tensor.fill_(1)

    library = torch.library.Library("aten", "IMPL")
    library.impl("bernoulli_.float", bernoulli, "CPU")
    ones = torch.ones(3, 2, requires_grad=True)
    nn.functional.dropout(ones, 0.25)
    nn.functional.dropout2d(ones[..., None, None], 0.25)
    scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3, dropout_p=0.5)
    assert calls == [(0.75, None, (3, 2)), (0.75, None, (3, 2, 1, 1)), (0.5, None, (1, 1, 2, 2))]
    del library
    nn.functional.dropout(ones, 0.25)
    assert len(calls) == 3


@rests_on_it("src/lockstep/distributed/randomness.py")
def test_random_numbers_of_generators() -> None:
    """SFC64 gives the same 64-bit numbers for a seed in every version of numpy. randint up to 2**63 - 1 without a
    generator draws from torch's default one. default_generator.manual_seed seeds a CPU as manual_seed does. np.random
    refuses seeds from 2**32 on. lt of int32 writes 1 and 0 into a float `out`."""
    assert np.random.SFC64(12345).random_raw(3).tolist() == [
        *(3527068094297800258, 5648030432468382359, 9063957079744815110),
    ]
    drawn = []
    for generator in (None, torch.default_generator):
        torch.default_generator.manual_seed(7)
        drawn.append(int(torch.randint(2**63 - 1, (), generator=generator)))
    assert drawn == [1407639518939636932] * 2
    states = []
    for seed in (torch.manual_seed, torch.default_generator.manual_seed):
        seed(2**63 - 1)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    with pytest.raises(ValueError, match="32"):
        np.random.seed(2**32)
    out = torch.empty(3, dtype=torch.bfloat16)
    assert torch.lt(torch.tensor([-(2**31), 2, 3], dtype=torch.int32), 3, out=out).tolist() == [1, 1, 0]


@rests_on_it("src/lockstep/distributed/world.py", "src/lockstep/strategies/engines/region.py")
def test_deterministic_algorithms_fill_new_tensors() -> None:
    """Under use_deterministic_algorithms torch.empty fills with NaN, unless fill_uninitialized_memory is False.
    set_deterministic_debug_mode("default") turns determinism off and leaves cudnn.deterministic unchanged."""
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic  # type: ignore[attr-defined]
    filled = []
    try:
        torch.use_deterministic_algorithms(True)
        for fill in (True, False):
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            freed = [torch.zeros(1000) for _ in range(20)]
            del freed
            filled.append(bool(torch.empty(1000).isnan().all()))
        assert torch.get_deterministic_debug_mode() == 2
        torch.set_deterministic_debug_mode("default")
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before[0]  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)
    assert (before[0], filled) == (True, [True, False])
    assert torch.backends.cudnn.deterministic is before[1]


@rests_on_it("src/lockstep/distributed/step_timer.py")
def test_when_a_profile_with_a_schedule_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile with a schedule calls on_trace_ready once: after `active` steps, or in stop() if fewer were recorded.
    key_averages with acc_events has the counts of all active steps, times in microseconds, and rows named
    ProfilerStep*. A trace whose name ends in .gz is compressed."""
    from torch.profiler import ProfilerActivity, profile, schedule

    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    ready: list[dict[str, int]] = []
    path = tmp_path / "trace.json.gz"

    def on_ready(trace: Any) -> None:
        trace.export_chrome_trace(str(path))
        rows = trace.key_averages()
        assert all(row.self_cpu_time_total >= 0 and row.self_device_time_total == 0 for row in rows)
        ready.append({row.key: row.count for row in rows})

    for active, steps in ((2, 6), (5, 3)):
        times = schedule(wait=1, warmup=1, active=active, repeat=1)
        recorder = profile(activities=[ProfilerActivity.CPU], schedule=times, on_trace_ready=on_ready, acc_events=True)
        recorder.start()
        for _ in range(steps):
            torch.ones(2).exp()
            recorder.step()
        recorder.stop()
    assert [rows["aten::exp"] for rows in ready] == [2, 1]
    assert all("ProfilerStep*" in rows for rows in ready)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
