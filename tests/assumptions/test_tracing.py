"""Assumptions about torch where it traces, hooks and probes: modes, graphs, modules, loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Subset, default_collate, random_split

from support.assumed import rests_on_it


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py")
def test_the_autocast_cache_is_cleared_at_the_end_of_the_outermost_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.autocast calls torch.clear_autocast_cache, by that name, once at the end of the outermost region."""
    calls: list[bool] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append(True))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            pass
        assert not calls
    assert len(calls) == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py", "src/lockstep/plain/module.py")
def test_random_split_creates_its_subsets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """random_split calls Subset from its own frame, once per part, in order; the parts are disjoint."""
    import sys

    init: Any = Subset.__init__
    makers: list[set[str]] = []

    def begin(self: Any, *args: Any) -> None:
        init(self, *args)
        frame: Any = sys._getframe(1)
        makers.append({frame.f_code.co_name, frame.f_back.f_code.co_name})

    monkeypatch.setattr(Subset, "__init__", begin)
    parts = random_split(list(range(10)), [7, 3])  # type: ignore[arg-type]
    assert len(makers) == 2
    assert all("random_split" in names for names in makers)
    assert sorted(i for part in parts for i in part.indices) == list(range(10))


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/gradient_history.py")
def test_writes_through_data_are_not_counted() -> None:
    """A tensor's version increases with each in-place write, except writes through .data."""
    tensor = torch.ones(2)
    tensor.add_(1)
    assert tensor._version == 1
    tensor.data.add_(1)
    assert tensor._version == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py")
def test_owners_of_a_tensor_are_counted() -> None:
    """Tensor._use_count counts the owners of a tensor in C++, all its Python references as one."""
    tensor = torch.ones(1)
    again = tensor
    assert again._use_count() == 1
    product = torch.ones(1, requires_grad=True) * tensor
    assert tensor._use_count() == 2
    del product
    assert tensor._use_count() == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_a_dispatch_mode_sees_schemas_tags_and_nodes() -> None:
    """A dispatch mode receives operators whose schema marks the arguments that they write, with a tag for random ones.
    After an operator with a gradient, its node's sequence number is one less than the next node's."""
    seen: dict[str, tuple[bool, bool]] = {}

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise torch imports its compiler

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            seen[str(func)] = writes, torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():
        y = x * 2
        number = torch.autograd._get_sequence_nr() - 1
        functional.dropout(y, 0.5)
        torch.zeros(3).add_(1)
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == number  # type: ignore[attr-defined]
    assert seen["aten.mul.Tensor"] == (False, False)
    assert seen["aten.add_.Tensor"] == (True, False)
    assert any(drawn and ("dropout" in name or "bernoulli" in name) for name, (_, drawn) in seen.items())


@rests_on_it("src/lockstep/tasks/modules/loss_probe.py", "src/lockstep/strategies/exact/tensor_leaves.py")
def test_a_function_mode_sees_names_and_options() -> None:
    """A function mode sees cross_entropy, also when a module calls it, with weight and reduction as keywords, and
    dropout with `training`."""
    seen: dict[str, dict[str, Any]] = {}

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.setdefault(getattr(func, "__name__", ""), kwargs or {})
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.CrossEntropyLoss(torch.ones(3))(torch.randn(2, 3), torch.tensor([0, 1]))
        functional.dropout(torch.ones(3), 0.5, False)
    assert isinstance(seen["cross_entropy"]["weight"], Tensor)
    assert seen["cross_entropy"]["reduction"] == "mean"
    assert seen["dropout"]["training"] is False


@rests_on_it("src/lockstep/strategies/engines/layers.py")
def test_a_weight_is_read_through_the_dictionary_of_its_module() -> None:
    """module.weight reads module._parameters, whose class can be replaced. A prepended forward hook runs first. A hook
    with always_call runs at the end even after an error."""
    reads: list[str] = []

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            reads.append(key)
            return dict.__getitem__(self, key)

    layer, order = nn.Linear(2, 2), list[str]()
    layer._parameters = Watched(layer._parameters)
    layer.register_forward_pre_hook(lambda *_: order.append("second"))
    layer.register_forward_pre_hook(lambda *_: order.append("first"), prepend=True)
    layer.register_forward_hook(lambda *_: order.append("end"), always_call=True)
    with pytest.raises(RuntimeError):
        layer(torch.ones(3))
    assert reads == ["weight", "bias"]
    assert order == ["first", "second", "end"]


@rests_on_it("src/lockstep/tasks/models/pooling.py", "src/lockstep/tasks/models/qa_spans.py")
def test_a_hook_with_keywords_replaces_the_output() -> None:
    """A forward hook with with_kwargs=True receives keyword arguments, and replaces the model's output by its return
    value."""

    class Model(nn.Module):
        def forward(self, x: int, mask: int = 0) -> int:
            return x

    model = Model()
    model.register_forward_hook(lambda _, args, kwargs, output: (args, kwargs, output), with_kwargs=True)
    assert model(1, mask=2) == ((1,), {"mask": 2}, 1)


@rests_on_it("src/lockstep/data/host_facts.py")
def test_attributes_of_a_tensor_belong_to_the_object() -> None:
    """Views, copies and results of a tensor do not have its Python attributes; in-place operators return the same
    object, which has them."""
    mask: Any = torch.ones(2, 3)
    mask.facts = 1
    for other in (mask[:1], mask.clone(), mask.detach(), mask.view_as(mask), mask.bool(), mask.to(torch.float64)):
        assert not hasattr(other, "facts")
    assert mask.fill_(0).facts == 1


@rests_on_it("src/lockstep/training/recovery/peer_checkpoints.py")
def test_viewing_bytes_needs_alignment() -> None:
    """A slice of bytes can be viewed as a wider dtype only at an offset that is a multiple of the dtype's size."""
    room = torch.zeros(24, dtype=torch.uint8)
    assert room[8:16].view(torch.float64).shape == (1,)
    with pytest.raises(RuntimeError, match="divisible"):
        room[4:12].view(torch.float64)


@rests_on_it("src/lockstep/tasks/modules/dataset.py", "src/lockstep/data/batch.py", "src/lockstep/data/host_facts.py")
def test_a_loader_without_batching() -> None:
    """With batch_size None a DataLoader passes each item of its sampler to the data set. It converts returned tuples to
    lists, and leaves objects of other classes, such as lockstep's bundles, unchanged. With its own generator it draws
    nothing from torch's."""

    class Bundle:
        def __init__(self, job: Any) -> None:
            self.job = job

    class Data(torch.utils.data.Dataset[Any]):
        def __getitem__(self, job: tuple[int, list[int]]) -> Any:
            return job, Bundle(job)

    state = torch.get_rng_state()
    jobs: list[Any] = [(1, [2, 3]), (4, [])]
    loader = DataLoader(Data(), sampler=jobs, batch_size=None, generator=torch.Generator())
    assert [(first, bundle.job) for first, bundle in loader] == [([1, [2, 3]], jobs[0]), ([4, []], jobs[1])]
    assert torch.equal(torch.get_rng_state(), state)


@rests_on_it("src/lockstep/tasks/modules/dataset.py", "src/lockstep/plain/module.py")
def test_types_of_default_collate() -> None:
    """default_collate turns Python floats into float64, integers into int64 and strings into lists, and refuses unequal
    lengths instead of padding."""
    made = default_collate([{"x": 0.5, "n": 1, "t": "a"}, {"x": 1.5, "n": 2, "t": "b"}])
    assert (made["x"].dtype, made["n"].dtype, made["t"]) == (torch.float64, torch.int64, ["a", "b"])
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate([torch.ones(2), torch.ones(3)])


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/placement.py")
def test_blocks_of_sharded_tensors() -> None:
    """A tensor sharded twice along one dimension is split as by torch.chunk, first by the mesh's first dimension, then
    by the second. The last ranks have the smaller shards."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as placed

    blocks = [placed((7, 3), (2, 2), [i, j], [Shard(0), Shard(0)]) for i in (0, 1) for j in (0, 1)]
    assert [(next(iter(shape)), next(iter(offset))) for shape, offset in blocks] == [(2, 0), (2, 2), (2, 4), (1, 6)]


@rests_on_it("src/lockstep/strategies/engines/layers.py")
def test_the_plan_of_a_llama_has_two_styles() -> None:
    """transformers' tensor parallel plan of a Llama marks its layers colwise or rowwise, and nothing else."""
    from transformers import LlamaConfig

    assert set(LlamaConfig().base_model_tp_plan.values()) == {"colwise", "rowwise"}  # type: ignore[union-attr]


@rests_on_it("src/lockstep/strategies/engines/cuda_graphs.py")
def test_names_of_cuda_graphs_and_who_remembers_a_stream() -> None:
    """CUDAGraph.capture_begin takes a pool and an error mode. An AccumulateGrad node belongs to one tensor, and
    parameters of the same memory have nodes of their own, with gradients of the dtype that grad_dtype says."""
    import inspect

    begins = inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    assert {"pool", "capture_error_mode"} <= set(begins)
    assert all(hasattr(torch.cuda.CUDAGraph, name) for name in ("capture_end", "replay"))
    assert callable(torch.cuda.graph_pool_handle)
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    alias = torch.nn.Parameter(layer.weight.detach())
    alias.grad_dtype = layer.weight.grad_dtype
    result = torch.func.functional_call(layer, {"weight": alias}, torch.ones(1, 3, dtype=torch.bfloat16))
    nodes = [(weight * 1).grad_fn.next_functions[0][0] for weight in (layer.weight, alias)]  # type: ignore[union-attr]
    assert nodes[0] is not nodes[1]
    assert [node.variable is weight for node, weight in zip(nodes, (layer.weight, alias), strict=True)] == [True, True]
    (slope,) = torch.autograd.grad(result.sum(), alias)
    assert (slope.dtype, alias.data_ptr()) == (torch.float32, layer.weight.data_ptr())


@rests_on_it("src/lockstep/strategies/engines/region.py")
def test_compiler_options_that_turn_off_timing() -> None:
    """Inductor's config has the options that turn off choices based on timing, and refuses unknown options."""
    import torch._inductor.config as config

    names = ("deterministic", "shape_padding", "coordinate_descent_tuning", "max_autotune", "cpp_wrapper")
    assert all(hasattr(config, name) for name in names)
    with pytest.raises((AttributeError, KeyError)), config.patch(no_such_option=True):
        pass


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/gradient_history.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/operations.py",
    "src/lockstep/strategies/engines/side_effects.py",
)
def test_versions_of_dtensors_and_local_tensors() -> None:
    """A write to a DTensor raises only the DTensor's version, a write to its local tensor only the local tensor's; a
    write by torch._foreach raises neither. A dispatch mode receives DTensors, not their local tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        types: list[str] = []

        class Noted(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
                types.append(type(args[0]).__name__)
                return func(*args, **(kwargs or {}))

        with Noted():
            sharded.mul_(2)
        counts = [(sharded._version, sharded.to_local()._version)]
        sharded.to_local().mul_(2)
        counts.append((sharded._version, sharded.to_local()._version))
        torch._foreach_mul_([sharded], 2)
        counts.append((sharded._version, sharded.to_local()._version))
    finally:
        torch.distributed.destroy_process_group()
    assert types == ["DTensor"]
    assert counts == [(1, 0), (1, 1), (1, 1)]
    assert sharded.to_local()[0, 0] == 8


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
)
def test_the_graph_of_a_cross_entropy_holds_its_targets() -> None:
    """Cross entropy is a node NllLossBackward0 on a LogSoftmaxBackward0. They hold targets, reduction (none 0, mean
    1, sum 2), ignored class and dimension, negative values possibly plus 2**64. For images the node is
    NllLoss2DBackward0."""
    logits, targets = torch.zeros(4, 3, requires_grad=True), torch.tensor([0, 1, 2, -100])
    for number, reduction in enumerate(("none", "mean", "sum")):
        node: Any = functional.cross_entropy(logits, targets, reduction=reduction).grad_fn
        assert node.name() == "NllLossBackward0"
        assert torch.equal(node._saved_target, targets)
        assert node._saved_reduction == number
        assert node._saved_ignore_index in (-100, 2**64 - 100)
        softmax = node.next_functions[0][0]
        assert (softmax.name(), softmax._saved_dim) == ("LogSoftmaxBackward0", 1)
        assert list(softmax._input_metadata[0].shape) == [4, 3]
    pixels = torch.zeros(2, 3, 4, 4, requires_grad=True)
    image: Any = functional.cross_entropy(pixels, torch.zeros(2, 4, 4, dtype=torch.int64))
    assert image.grad_fn.name() == "NllLoss2DBackward0"


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
    "packages/lockstep-trace/src/lockstep_trace/rules/modes.py",
)
def test_the_graph_of_a_regression_holds_its_targets() -> None:
    """The nodes of torch's regression and binary losses are named after them, and hold targets and reduction. l1_loss
    has no node of its own, but Mean, Abs and Sub, and Expand if shapes differ."""
    outputs, targets = torch.full((4, 3), 0.5, requires_grad=True), torch.rand(4, 3)
    losses = {
        "MseLoss": functional.mse_loss,
        "SmoothL1Loss": functional.smooth_l1_loss,
        "HuberLoss": functional.huber_loss,
        "BinaryCrossEntropy": functional.binary_cross_entropy,
        "BinaryCrossEntropyWithLogits": functional.binary_cross_entropy_with_logits,
    }
    for name, loss in losses.items():
        node: Any = loss(outputs, targets).grad_fn
        assert node.name() == f"{name}Backward0"
        assert torch.equal(node._saved_target, targets)
        assert node._saved_reduction == 1
    absolute: Any = functional.l1_loss(outputs[:, :1], targets, reduction="sum")
    assert absolute.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[0][0].name() == "ExpandBackward0"
    node, names = functional.l1_loss(outputs, targets).grad_fn, []
    for _ in range(3):
        names.append(node.name())
        node = node.next_functions[0][0]
    assert names == ["MeanBackward0", "AbsBackward0", "SubBackward0"]
    power: Any = (outputs**2).grad_fn
    assert (power.name(), power._saved_exponent) == ("PowBackward0", 2)
    spread: Any = outputs[:, :1].expand(4, 3).grad_fn
    assert (spread.name(), list(spread._saved_self_sym_sizes)) == ("ExpandBackward0", [4, 1])


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/logits.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/graph.py",
)
def test_the_graph_of_an_attention_holds_its_mask() -> None:
    """A fused attention's node ScaledDotProduct... holds query, key, is_causal, and the mask or None. Without fusion
    there is a node Softmax or SafeSoftmax with the attention weights, whose dropout is a Mul node with its mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(2, 2, 5, 8, requires_grad=True)
    mask = torch.ones(2, 1, 5, 5).tril().bool()
    for causal, given in ((True, None), (False, mask), (False, None)):
        fused = functional.scaled_dot_product_attention(query, query, query, attn_mask=given, is_causal=causal)
        node: Any = fused.grad_fn
        assert node.name().startswith("ScaledDotProduct")
        assert node._saved_query.shape == node._saved_key.shape == query.shape
        assert node._saved_is_causal is causal
        assert (node._saved_attn_mask is None) == (given is None)
        if given is not None:
            hidden = node._saved_attn_mask.expand(2, 2, 5, 5)
            assert torch.equal(hidden if hidden.dtype == torch.bool else hidden > -30.0, mask.expand(2, 2, 5, 5))
    with sdpa_kernel(SDPBackend.MATH):
        apart: Any = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    rows, known = [apart.grad_fn], dict[str, Any]()
    while rows:
        node = rows.pop()
        known[node.name().partition("Backward")[0]] = node
        rows.extend(before for before, _ in node.next_functions if before is not None)
    weights = known["SafeSoftmax"]._saved_result
    assert torch.equal(weights.view(2, 2, 5, 5) > 0, mask.expand(2, 2, 5, 5))
    dropped: Any = functional.dropout(torch.softmax(torch.ones(3, 3, requires_grad=True), -1), 0.5).grad_fn
    assert dropped.name() == "MulBackward0"
    assert dropped._saved_self is None
    assert dropped._saved_other.shape == (3, 3)
    assert dropped.next_functions[0][0].name() == "SoftmaxBackward0"


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_the_collectives_read_and_write_these_arguments() -> None:
    """The operators of torch's collectives have these names. Their first tensors are written, their second ones read,
    unless they are the same."""
    apart = ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_")
    apart += ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
    apart += ("gather_", "scatter_", "alltoall_", "alltoall_base_")
    same = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "recv_", "recv_any_source_")
    for name in (*apart, *same):
        first, second, *_ = getattr(torch.ops.c10d, name).default._schema.arguments
        assert "Tensor" in str(first.type)
        assert ("Tensor" in str(second.type)) == (name in apart), name
        assert first.name.startswith("output") == second.name.startswith("input") == (name in apart), name


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_modes_can_be_pushed_below_others() -> None:
    """The stack of dispatch modes can be read from the bottom, popped and pushed. A user's mode has the `_mode_key`
    None. The topmost mode sees an operation first."""
    from torch.utils import _python_dispatch as dispatch

    order: list[str] = []

    class Mode(TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            order.append(self.name)
            return func(*args, **(kwargs or {}))

    above, below = Mode("above"), Mode("below")
    with above:
        assert dispatch._get_current_dispatch_mode_stack() == [above]
        assert getattr(above, "_mode_key", None) is None
        assert dispatch._pop_mode() is above
        dispatch._push_mode(below)
        dispatch._push_mode(above)
        torch.ones(1)
        dispatch._pop_mode()
        dispatch._pop_mode()
        dispatch._push_mode(above)
    assert order == ["above", "below"]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/operations.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/checker.py",
)
def test_an_operation_in_backward_knows_its_node() -> None:
    """During a backward, the current node is the running operation's; its sequence number is the value of
    _get_sequence_nr before the forward operation. The node of a weight has the weight as `variable`. Outside a backward
    there is no current node."""
    weight = torch.ones(2, requires_grad=True)
    number = torch.autograd._get_sequence_nr()
    doubled = weight * 2
    nodes: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = torch._C._current_autograd_node()
            nodes.append(node and (node.name(), getattr(node, "variable", None), node))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(1)
        doubled.backward(torch.ones(2))
    assert nodes[0] is None
    (multiplied,) = (each for each in nodes if each and each[0] == "MulBackward0")
    assert multiplied[2]._sequence_nr() == number
    leaves = [each for each in nodes if each and each[0].endswith("AccumulateGrad")]
    assert all(each[1] is weight for each in leaves)
    assert leaves


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/replay.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/checker.py",
    "src/lockstep/strategies/engines/side_effects.py",
)
def test_attributes_that_hold_hooks() -> None:
    """Hooks are in four attributes of modules, two of torch.nn.modules.module (global hooks) and two of weights, which
    are empty or None without hooks."""
    import torch.nn.modules.module as everywhere

    layer: Any = nn.Linear(1, 1)
    kinds = {
        "_forward_pre_hooks": layer.register_forward_pre_hook,
        "_forward_hooks": layer.register_forward_hook,
        "_backward_hooks": layer.register_full_backward_hook,
        "_backward_pre_hooks": layer.register_full_backward_pre_hook,
    }
    for name, register in kinds.items():
        assert not getattr(layer, name)
        register(print)
        assert list(getattr(layer, name).values()) == [print]
    weight: Any = layer.weight
    assert not weight._backward_hooks
    assert not weight._post_accumulate_grad_hooks
    handle = weight.register_hook(print)
    weight.register_post_accumulate_grad_hook(print)
    assert list(weight._backward_hooks) == [handle.id]
    assert weight._post_accumulate_grad_hooks
    assert not everywhere._global_forward_hooks
    assert not everywhere._global_forward_pre_hooks
    handles = [
        everywhere.register_module_forward_hook(print),
        everywhere.register_module_forward_pre_hook(print),
    ]
    assert len(everywhere._global_forward_hooks) == len(everywhere._global_forward_pre_hooks) == 1
    for each in handles:
        each.remove()


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/layouts.py",
)
def test_a_scheduler_steps_once_when_it_is_made() -> None:
    """A scheduler's constructor calls step() once, from `__init__` or `_initial_step`. `_last_lr` holds the rates of
    its last step."""
    import sys

    from torch.optim import lr_scheduler

    callers: list[set[str]] = []

    class Watched(lr_scheduler.StepLR):
        def step(self, *args: Any) -> None:
            frame: Any = sys._getframe(1)  # or the one before it, in a process in which steps are wrapped
            callers.append({frame.f_code.co_name, frame.f_back.f_code.co_name})
            super().step(*args)

    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    scheduler = Watched(optimizer, 1)
    assert len(callers) == 1
    assert callers[0] & {"__init__", "_initial_step"}
    optimizer.step()
    scheduler.step()
    assert scheduler._last_lr == [group["lr"] for group in optimizer.param_groups] == [0.1]


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/placement.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/replay.py",
)
def test_attributes_that_hold_a_wrapped_model() -> None:
    """torch's wrappers hold the wrapped module under `_orig_mod` (compile), `module` (DataParallel),
    `_checkpoint_wrapped_module` and `_fsdp_wrapped_module`; compile() of a module sets its `_compiled_call_impl`."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import _common_utils

    layer: Any = nn.Linear(1, 1)
    compiled: Any = torch.compile(layer)
    assert type(compiled).__name__ == "OptimizedModule"
    assert compiled._orig_mod is layer
    assert next(compiled.named_parameters())[0] == "_orig_mod.weight"
    assert nn.DataParallel(layer).module is layer
    assert getattr(checkpoint_wrapper(layer), "_checkpoint_wrapped_module") is layer  # noqa: B009
    assert _common_utils.FSDP_WRAPPED_MODULE == "_fsdp_wrapped_module"
    assert layer._compiled_call_impl is None
    layer.compile()
    assert layer._compiled_call_impl is not None


@rests_on_it(
    "src/lockstep/strategies/engines/fsdp.py",
    "src/lockstep/strategies/engines/side_effects.py",
    "src/lockstep/strategies/engines/blocks.py",
    "src/lockstep/strategies/exact/tensor_leaves.py",
    "src/lockstep/training/plain_sides.py",
    "packages/lockstep-plan/src/lockstep_plan/simulated.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/checker.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/replay.py",
)
def test_trees_modes_errors_and_wrapped_steps() -> None:
    """tree_leaves flattens lists, tuples and mappings, but not dataclasses and None. _get_current_dispatch_mode returns
    the active mode, or None. OutOfMemoryError is a RuntimeError and the same class as torch.cuda's. `step` of an
    optimizer's class is wrapped; `__wrapped__` is the original. A tensor's output_nr is its number among a node's
    results. Dropout's module defines all of its kinds. unflatten takes one -1. get_autocast_dtype of a CPU is bfloat16,
    and is_autocast_enabled takes a device type."""
    import collections
    import dataclasses

    from torch.utils import _python_dispatch, _pytree

    @dataclasses.dataclass
    class Plain:
        value: int

    plain = Plain(2)
    tree = [None, {"a": 1}, plain, collections.OrderedDict(x=3), (4, [])]
    assert _pytree.tree_leaves(tree) == [None, 1, plain, 3, 4]
    leaves, spec = _pytree.tree_flatten(tree)
    assert _pytree.tree_unflatten(leaves, spec) == tree
    assert _python_dispatch._get_current_dispatch_mode() is None

    class Mode(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        assert _python_dispatch._get_current_dispatch_mode() is mode
        assert isinstance(torch.ops.aten.add.Tensor, torch._ops.OpOverload)
    assert issubclass(torch.OutOfMemoryError, RuntimeError)
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        assert callable(kind.step.__wrapped__)  # type: ignore[attr-defined]
    low, high = torch.ones(4, requires_grad=True).exp().split(2)
    assert (low.output_nr, high.output_nr, low.grad_fn is high.grad_fn) == (0, 1, True)
    assert {kind.__module__ for kind in (nn.Dropout, nn.Dropout1d, nn.AlphaDropout)} == {"torch.nn.modules.dropout"}
    assert torch.ones(4, 6).unflatten(1, (2, 3, -1)).shape == (4, 2, 3, 1)
    assert torch.promote_types(torch.bfloat16, torch.float32) == torch.float32
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
