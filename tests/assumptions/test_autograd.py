"""Assumptions about autograd, modules, hooks and autocast."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.assumed import rests_on_it


@rests_on_it("src/lockstep/strategies/single.py", "src/lockstep/strategies/engines/zero_sums.py")
def test_post_accumulate_hook_runs_once_per_backward() -> None:
    """A post-accumulate hook runs once for each backward, after all uses of the weight have been added to .grad."""
    weight = nn.Parameter(torch.ones(2))
    seen: list[list[float]] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    (weight * 2 + weight * 3).sum().backward()
    assert seen == [[5.0, 5.0]]


@rests_on_it("src/lockstep/strategies/observer.py", "src/lockstep/proof/replay_rank.py")
def test_a_tensor_hook_sees_one_backward_alone() -> None:
    """A register_hook hook on a weight receives the gradient of the current backward only, not what .grad already
    holds."""
    weight = nn.Parameter(torch.ones(2))
    seen: list[list[float]] = []
    weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
    for _ in range(2):
        (weight * 2 + weight * 3).sum().backward()
    assert seen == [[5.0, 5.0]] * 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0, 10.0]


@rests_on_it("src/lockstep/strategies/exact/training_state.py", "src/lockstep/strategies/engines/fsdp.py")
def test_gradients_can_be_wider_than_weights() -> None:
    """With grad_dtype float32, .grad of a bfloat16 weight is float32, and gradients accumulate in float32."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    for factor in (256.0, 1.0):
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 257.0


@rests_on_it("src/lockstep/strategies/exact/update.py", "src/lockstep/strategies/single.py")
def test_an_unused_weight_has_no_gradient() -> None:
    """A weight that a backward does not reach keeps None as .grad; a weight whose gradient is zero gets a tensor of
    zeros."""
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    (used * 0 + torch.ones(1)).sum().backward()
    assert used.grad is not None
    assert used.grad.item() == 0
    assert unused.grad is None


@rests_on_it("src/lockstep/strategies/exact/training_state.py", "src/lockstep/strategies/exact/update.py")
def test_a_gradient_has_the_layout_of_its_weight() -> None:
    """.grad of a contiguous weight is contiguous, even if the matrix product returns its gradient as a transposed
    matrix."""
    weight = nn.Parameter(torch.randn(3, 5))
    (torch.randn(4, 5) @ weight.t()).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_contiguous()


@rests_on_it("src/lockstep/strategies/exact/gradient_sum.py", "src/lockstep/plain/train.py")
def test_accumulating_is_adding_from_the_left() -> None:
    """Several backwards add to .grad in the order in which they run: ((a + b) + c), bit for bit."""
    torch.manual_seed(0)
    factors = [torch.randn(64) for _ in range(3)]
    weight = nn.Parameter(torch.ones(64))
    for factor in factors:
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (factors[0] + factors[1]) + factors[2])


@rests_on_it("src/lockstep/strategies/fsdp2.py", "src/lockstep/strategies/engines/cuts.py")
def test_autocast_keeps_its_casts_for_the_region() -> None:
    """Autocast casts a weight once per region and does not notice a later change of it; the next region casts again."""
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with torch.no_grad():
            layer.weight.zero_()
        within = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        after = layer(x)
    assert torch.equal(before, within)
    assert not after.any()


@rests_on_it("src/lockstep/strategies/engines/cuts.py")
def test_autocast_adds_uses_of_a_weight_in_bfloat16() -> None:
    """Under autocast, the gradients of two uses of one weight are added in bfloat16 if both share one cast."""
    weight = nn.Parameter(torch.ones(1, 1))
    big, small = torch.full((1, 1), 256.0), torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        total = nn.functional.linear(big, weight) + nn.functional.linear(small, weight)
    total.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert weight.grad.item() == 256.0


@rests_on_it("src/lockstep/tasks/language_modeling.py", "src/lockstep/tasks/models/chunked_loss.py")
def test_autocast_computes_losses_in_float32() -> None:
    """Under autocast, cross_entropy of bfloat16 logits is computed in float32."""
    logits = torch.randn(8, 16).bfloat16()
    labels = torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        nn.functional.cross_entropy(logits.float(), labels, reduction="sum").item(), rel=1e-6
    )


@rests_on_it("src/lockstep/strategies/engines/blocks.py")
def test_a_recomputed_layer_has_the_same_bits_and_dropout() -> None:
    """checkpoint(use_reentrant=False) gives the bits of a plain call, in output and gradients, with dropout too."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def gradients(recompute: bool) -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        output = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        output.sum().backward()
        return [output.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


@rests_on_it("src/lockstep/strategies/engines/side_effects.py", "src/lockstep/strategies/engines/blocks.py")
def test_a_recomputed_layer_writes_its_buffers_twice() -> None:
    """checkpoint runs a layer's forward again in backward, and with it writes to buffers: a BatchNorm counts two
    batches."""
    norm = nn.BatchNorm1d(2)
    checkpoint(norm, torch.randn(4, 2, requires_grad=True), use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 2


@rests_on_it("src/lockstep/strategies/engines/fsdp.py", "src/lockstep/strategies/engines/zero_graph.py")
def test_hooks_run_in_the_order_of_their_registration() -> None:
    """Forward hooks run in the order of registration; one registered with prepend=True runs before all others."""
    layer, seen = nn.Linear(1, 1), []
    layer.register_forward_hook(lambda *_: seen.append("first"))
    layer.register_forward_hook(lambda *_: seen.append("second"))
    layer.register_forward_hook(lambda *_: seen.append("before"), prepend=True)
    layer(torch.ones(1, 1))
    assert seen == ["before", "first", "second"]


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_backward_runs_the_newest_ready_node_first() -> None:
    """Among autograd nodes whose gradients are complete, the node created last runs first."""
    x = torch.ones(1, requires_grad=True)
    seen: list[str] = []
    first, second = x * 2, x * 3
    first.register_hook(lambda _: seen.append("first"))
    second.register_hook(lambda _: seen.append("second"))
    (first + second).sum().backward()
    assert seen == ["second", "first"]


@rests_on_it("src/lockstep/strategies/exact/stepper.py", "src/lockstep/checkpoint/shard_files.py")
def test_names_of_weights_are_in_the_order_of_registration() -> None:
    """named_parameters and state_dict follow the order of registration; a tied weight appears once in the former, under
    its first name, and under both names in the latter."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.first.weight = self.second.weight

    assert [name for name, _ in Tied().named_parameters()] == ["second.weight"]
    assert list(Tied().state_dict()) == ["second.weight", "first.weight"]


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_buffers_that_are_not_persistent_are_not_saved() -> None:
    """state_dict leaves out buffers registered with persistent=False; named_buffers includes them."""
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert list(module.state_dict()) == ["kept"]
    assert [name for name, _ in module.named_buffers()] == ["kept", "made"]


@rests_on_it("src/lockstep/strategies/engines/zero_partition.py", "src/lockstep/tasks/task.py")
def test_a_deep_copy_keeps_ties() -> None:
    """copy.deepcopy of a module keeps tied weights tied, and shares no memory with the original."""
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    module[1].weight = module[0].weight
    copied = copy.deepcopy(module)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.data_ptr() != module[0].weight.data_ptr()


@rests_on_it(
    "src/lockstep/strategies/fsdp2.py", "src/lockstep/strategies/pipeline.py", "src/lockstep/training/resolve.py"
)
def test_a_model_on_meta_draws_no_random_numbers() -> None:
    """Modules created on the meta device have shapes, dtypes and ties, and draw nothing from torch's generator."""
    before = torch.get_rng_state()
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert (layer.weight.is_meta, layer.weight.shape) == (True, (2, 3))


@rests_on_it("src/lockstep/tasks/models/storage_dtype.py", "src/lockstep/strategies/engines/zero_graph.py")
def test_saved_tensors_can_be_replaced_without_a_change() -> None:
    """saved_tensors_hooks see the weight that a matrix product saves; backward uses the tensor that unpack returns."""
    weight, x = nn.Parameter(torch.randn(2, 3)), torch.randn(4, 3, requires_grad=True)
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor.data_ptr())
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        y = nn.functional.linear(x, weight)
    y.sum().backward()
    assert weight.data_ptr() in packed
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 2) @ weight.detach())


@rests_on_it("src/lockstep/strategies/exact/gradient_sum.py")
def test_a_sparse_gradient_has_a_row_for_each_use() -> None:
    """The gradient of Embedding(sparse=True) has one row per index, in the order of the indices; repeated indices are
    not merged."""
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([3, 1, 3])).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad._indices().tolist() == [[3, 1, 3]]
    assert not layer.weight.grad.is_coalesced()


@rests_on_it("src/lockstep/strategies/exact/update.py", "src/lockstep/tasks/models/inference.py")
def test_dropout_in_eval_draws_no_random_numbers() -> None:
    """Dropout in eval() draws nothing from torch's generator."""
    layer = nn.Dropout(0.5).eval()
    before = torch.get_rng_state()
    layer(torch.ones(8))
    assert torch.equal(before, torch.get_rng_state())


@rests_on_it("src/lockstep/distributed/portable.py", "src/lockstep/strategies/hf_accelerate.py")
def test_a_layer_norm_in_bfloat16_depends_on_threads() -> None:
    """On a CPU, each thread sums the gradient of LayerNorm's bias in bfloat16 if the input is bfloat16 and the weights
    are float32, so bits depend on the number of threads."""
    layer = nn.LayerNorm(8)
    layer(torch.randn(4096, 8).bfloat16()).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.dtype == torch.float32
    assert layer.bias.grad[0].item() == 256.0 * torch.get_num_threads()


@rests_on_it("src/lockstep/strategies/engines/blocks.py")
def test_recomputation_runs_in_its_own_context() -> None:
    """checkpoint(use_reentrant=False) calls context_fn once, before it runs the function within the first context. The
    second context surrounds the recomputation in backward, and is exited also if torch stops the recomputation early by
    an internal exception."""
    log: list[Any] = []

    @contextlib.contextmanager
    def context(name: str) -> Iterator[None]:
        log.append(name)
        try:
            yield
        finally:
            log.append(f"end of {name}")

    def function(x: torch.Tensor) -> torch.Tensor:
        log.append("run")
        return x.exp() * 2

    def contexts() -> Any:
        log.append("asked")
        return context("first"), context("second")

    x = torch.ones(3, requires_grad=True)
    loss = checkpoint(function, x, use_reentrant=False, context_fn=contexts).sum()
    assert log == ["asked", "first", "run", "end of first"]
    log.clear()
    loss.backward()
    assert log == ["second", "run", "end of second"]


@rests_on_it("src/lockstep/strategies/exact/tensor_leaves.py")
def test_function_backward_gets_zeros_for_unused_outputs() -> None:
    """The backward of an autograd.Function with several outputs receives a tensor of zeros for an output without a
    gradient. An output returned as input.view_as(input) is a separate tensor with its own gradient. backward may return
    None for an argument that is not a tensor."""

    class Spread(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, count: int) -> Any:
            return tuple(tensor.view_as(tensor) for _ in range(count))

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            seen.extend(g.tolist() for g in gradients)
            return sum(gradients), None

    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    one, _ = Spread.apply(x * 1, 2)
    (one * 3).sum().backward()
    assert seen == [[3.0, 3.0], [0.0, 0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@rests_on_it("src/lockstep/strategies/exact/tensor_leaves.py")
def test_a_tensor_subclass_receives_every_torch_call() -> None:
    """A Tensor subclass made by as_subclass receives functions, methods, operators and item assignment, also within a
    module's forward, through __torch_function__ under these names. It may return anything. Its attributes stay."""
    names: list[str] = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return True if func.__name__ == "__bool__" else args[0]

    own: Any = torch.empty(0).as_subclass(Own)
    own.leaves = (1, 2)
    assert own.leaves == (1, 2)
    names.clear()
    assert own + own is own
    assert 2 * own is own
    assert own.view(3) is own
    assert torch.cat([own, own])[0] is own
    assert nn.functional.softmax(own, dim=-1) is own
    assert nn.GELU()(own) is own
    assert nn.Dropout(0.5)(own) is own
    assert bool(own)
    own[0] = 1
    assert own.item() is own
    expected = ["add", "mul", "view", "cat", "softmax", "gelu", "dropout", "__bool__", "__setitem__", "item"]
    assert [name for name in names if name not in ("__getitem__", "__rmul__")] == expected or names == expected


@rests_on_it("src/lockstep/strategies/exact/gradient_sum.py")
def test_sums_of_sparse_rows_equal_dense_sums() -> None:
    """The coalesced sum of two coalesced row-sparse tensors has the bits of the dense sum, -0.0 + nothing = 0.0
    included. to_sparse(1) of a dense tensor keeps rows with a value other than 0.0 and -0.0, NaN included. torch does
    not verify is_coalesced. torch.cat can write into a slice passed as `out`."""
    drawn = torch.Generator().manual_seed(0)
    parts = []
    for rows in ([1, 3, 4], [0, 1, 4]):
        values = torch.randn(3, 5, generator=drawn)
        values[1] = -0.0
        parts.append(
            torch.sparse_coo_tensor(torch.tensor([rows]), values, (6, 5), is_coalesced=True, check_invariants=False)
        )
    one, other = parts
    assert one.is_coalesced()
    dense = torch.zeros(6, 5).add(one.to_dense()).add(other.to_dense())
    total = (one + other).coalesce()
    assert total._indices().tolist() == [[0, 1, 3, 4]]
    assert torch.equal(total.to_dense().view(torch.int32)[[0, 1, 4]], dense.view(torch.int32)[[0, 1, 4]])
    assert total.to_dense()[3].view(torch.int32).tolist() in ([0] * 5, [-(2**31)] * 5)
    whole = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-0.0, -0.0], [0.0, float("nan")]])
    assert whole.to_sparse(1).coalesce()._indices().tolist() == [[1, 3]]
    box = torch.zeros(5)
    torch.cat([torch.ones(2), torch.full((1,), 2.0)], out=box[:3])
    assert box.tolist() == [1, 1, 2, 0, 0]


@rests_on_it("src/lockstep/strategies/engines/side_effects.py", "src/lockstep/strategies/engines/cuts.py")
def test_weight_hooks_storages_deep_copies_and_submodule_names() -> None:
    """A weight's `_backward_hooks` is None before its first hook, then a mapping from handle id to hook, from which
    hooks can be deleted. `_cdata` of storages is equal for views and detached tensors, and differs for copies. deepcopy
    replaces a weight by the memo's entry under its id(). set_submodule takes a path, and get_submodule("") returns the
    module itself. named_modules and named_parameters with remove_duplicate=False list every name."""
    weight = nn.Parameter(torch.ones(2))
    assert weight._backward_hooks is None
    handle = weight.register_hook(lambda gradient: gradient * 2)
    assert weight._backward_hooks is not None
    assert list(weight._backward_hooks) == [handle.id]
    del weight._backward_hooks[handle.id]
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    same = [weight.view(1, 2), weight.detach(), weight.data, weight[1:]]
    assert {each.untyped_storage()._cdata for each in same} == {weight.untyped_storage()._cdata}
    assert weight.clone().untyped_storage()._cdata != weight.untyped_storage()._cdata
    layer = nn.Linear(2, 2)
    instead = nn.Parameter(torch.zeros(2))
    assert copy.deepcopy(layer, {id(layer.weight): instead}).weight is instead
    model = nn.Sequential(nn.ModuleDict({"a": layer}), layer)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    assert names == ["", "0", "0.a", "1"]
    assert len(list(model.named_parameters(remove_duplicate=False))) == 4
    model.set_submodule("0.a", nn.Identity())
    assert isinstance(model.get_submodule("0.a"), nn.Identity)
    assert model.get_submodule("") is model
