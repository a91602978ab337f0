"""What lockstep assumes about torch where it traces, hooks and probes: modes, graphs, modules, loaders."""

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


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/observers.py")
def test_a_split_at_random_makes_its_subsets_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
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


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/versions.py")
def test_writes_through_data_are_not_counted() -> None:
    """A tensor's version increases with each in-place write, but not with a write through .data."""
    tensor = torch.ones(2)
    tensor.add_(1)
    assert tensor._version == 1
    tensor.data.add_(1)
    assert tensor._version == 1


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/operations.py")
def test_a_mode_sees_schemas_seeds_and_nodes() -> None:
    """A dispatch mode receives operators whose schema says which arguments are written, with a tag for random ones;
    after an operator with a gradient, its node's number is one less than the next node's."""
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
def test_functions_reach_a_mode_by_name_with_their_options() -> None:
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
    """module.weight reads module._parameters, whose class can be replaced; a prepended forward hook runs first, and one
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
    """A forward hook with with_kwargs=True receives keyword arguments, and its return value replaces the model's
    output."""

    class Model(nn.Module):
        def forward(self, x: int, mask: int = 0) -> int:
            return x

    model = Model()
    model.register_forward_hook(lambda _, args, kwargs, output: (args, kwargs, output), with_kwargs=True)
    assert model(1, mask=2) == ((1,), {"mask": 2}, 1)


@rests_on_it("src/lockstep/data/host_facts.py")
def test_attributes_of_a_tensor_belong_to_the_object() -> None:
    """A Python attribute of a tensor is not on its views, copies or results, but in-place operators return the same
    object, which has it."""
    mask: Any = torch.ones(2, 3)
    mask.facts = 1
    for other in (mask[:1], mask.clone(), mask.detach(), mask.view_as(mask), mask.bool(), mask.to(torch.float64)):
        assert not hasattr(other, "facts")
    assert mask.fill_(0).facts == 1


@rests_on_it("src/lockstep/training/recovery/peer_checkpoints.py")
def test_bytes_are_seen_as_a_wide_dtype_where_they_are_aligned() -> None:
    """A slice of bytes can be viewed as a wider dtype only at an offset that is a multiple of the dtype's size."""
    room = torch.zeros(24, dtype=torch.uint8)
    assert room[8:16].view(torch.float64).shape == (1,)
    with pytest.raises(RuntimeError, match="divisible"):
        room[4:12].view(torch.float64)


@rests_on_it("src/lockstep/tasks/modules/dataset.py")
def test_a_loader_without_batches_passes_jobs_on_and_draws_from_its_own_generator() -> None:
    """With batch_size None a loader passes each item of its sampler to the data set. It converts returned tuples to
    lists, and leaves objects of other classes, such as lockstep's bundles, alone. With its own generator it draws
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


@rests_on_it("src/lockstep/tasks/modules/dataset.py")
def test_what_a_batch_is_made_of() -> None:
    """default_collate turns Python floats into float64, integers into int64 and strings into lists, and refuses unequal
    lengths instead of padding."""
    made = default_collate([{"x": 0.5, "n": 1, "t": "a"}, {"x": 1.5, "n": 2, "t": "b"}])
    assert (made["x"].dtype, made["n"].dtype, made["t"]) == (torch.float64, torch.int64, ["a", "b"])
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate([torch.ones(2), torch.ones(3)])


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/placement.py")
def test_blocks_of_sharded_tensors() -> None:
    """A tensor sharded twice along one dimension is cut like torch.chunk, first by the mesh's first dimension, then by
    the second; the last ranks have the smaller shards."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as placed

    blocks = [placed((7, 3), (2, 2), [i, j], [Shard(0), Shard(0)]) for i in (0, 1) for j in (0, 1)]
    assert [(next(iter(shape)), next(iter(offset))) for shape, offset in blocks] == [(2, 0), (2, 2), (2, 4), (1, 6)]


@rests_on_it("src/lockstep/strategies/engines/layers.py")
def test_the_plan_of_a_llama_has_two_styles() -> None:
    """transformers' tensor parallel plan of a Llama marks its layers colwise or rowwise, and nothing else."""
    from transformers import LlamaConfig

    assert set(LlamaConfig().base_model_tp_plan.values()) == {"colwise", "rowwise"}  # type: ignore[union-attr]


@rests_on_it("src/lockstep/strategies/engines/region.py")
def test_the_compiler_has_the_options_that_keep_it_from_timing() -> None:
    """Inductor's config has the options that turn off decisions by timing, and refuses unknown ones."""
    import torch._inductor.config as config

    names = ("deterministic", "shape_padding", "coordinate_descent_tuning", "max_autotune", "cpp_wrapper")
    assert all(hasattr(config, name) for name in names)
    with pytest.raises((AttributeError, KeyError)), config.patch(no_such_option=True):
        pass


@rests_on_it(
    "packages/lockstep-trace/src/lockstep_trace/tracer/versions.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/operations.py",
    "src/lockstep/strategies/engines/side_effects.py",
)
def test_writes_of_a_dtensor_count_in_it_and_those_of_its_part_there() -> None:
    """A write to a DTensor raises the DTensor's version only, a write to its local tensor the local tensor's only, and
    a write by torch._foreach neither; a dispatch mode receives DTensors, not their local tensors."""
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
