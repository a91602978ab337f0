"""Assumptions of `lockstep plan --simulate` about fake tensors, fake process groups and FLOP counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from support.assumed import rests_on_it


class Recorded(TorchDispatchMode):
    """Records the names, namespaces and arguments of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func.namespace, func._schema.name, args, out))
        return out


@rests_on_it("packages/lockstep-plan/src/lockstep_plan/simulated.py")
def test_fake_tensors_and_their_storages() -> None:
    """Under FakeTensorMode a new tensor has no data, but its own storage with size and `_cdata`, which views share.
    allow_non_fake_inputs lets it be used together with real tensors. unset_fake_temporarily and _disable_current_modes
    create real tensors. item() is the operation _local_scalar_dense, whose result an outer mode can supply."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
                return 0.0
            return func(*args, **(kwargs or {}))

    real = torch.ones(3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True), Answers():
        fake = torch.empty(4, 5)
        product = real @ fake
        assert isinstance(product, FakeTensor)
        assert product.untyped_storage().nbytes() == 3 * 5 * 4
        assert product.view(15).untyped_storage()._cdata == product.untyped_storage()._cdata
        assert (product * 2).untyped_storage()._cdata != product.untyped_storage()._cdata
        assert product.sum().item() == 0.0
        with unset_fake_temporarily():
            assert not isinstance(torch.ones(2), FakeTensor)
        with _disable_current_modes():
            assert not isinstance(torch.ones(2), FakeTensor)
        assert (fake.device.type, nn.Linear(2, 2).weight.device.type) == ("cpu", "cpu")


@rests_on_it("packages/lockstep-plan/src/lockstep_plan/simulated.py")
def test_storages_are_resized_through_the_method_of_their_class() -> None:
    """A storage is resized by UntypedStorage.resize_, looked up at the call, also under FakeTensorMode. A weakref
    notices when a storage is freed with its last tensor."""
    import gc
    import weakref

    calls: list[int] = []
    plain = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        calls.append(size)
        return plain(storage, size)

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        assert (calls, tensor.untyped_storage().nbytes()) == ([0], 0)
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
    ended: list[str] = []
    storage = torch.ones(4).untyped_storage()
    weakref.finalize(storage, ended.append, "ended")
    view = torch.empty(0).set_(storage)
    del storage
    gc.collect()
    assert ended == []
    del view
    gc.collect()
    assert ended == ["ended"]


@rests_on_it("packages/lockstep-plan/src/lockstep_plan/simulated.py")
def test_flop_are_counted_by_operation() -> None:
    """flop_registry has a function for matrix products, batched ones, convolutions and attention, called with the
    operation's arguments and out_val, but none for sums. sdpa_flop_count is 4 * B * H * T * S * D. It has none for
    attention on CPUs: operations that begin with _scaled_dot_product_flash_attention_for_cpu, whose backward has the
    three tensors as arguments 1 to 3."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    def flop(func: Any, *args: Any) -> int:
        return int(flop_registry[func.overloadpacket](*args, out_val=func(*args)))

    aten = torch.ops.aten
    assert flop(aten.mm.default, torch.ones(2, 3), torch.ones(3, 5)) == 2 * 2 * 3 * 5
    assert flop(aten.addmm.default, torch.ones(5), torch.ones(2, 3), torch.ones(3, 5)) == 2 * 2 * 3 * 5
    assert flop(aten.bmm.default, torch.ones(7, 2, 3), torch.ones(7, 3, 5)) == 7 * 2 * 2 * 3 * 5
    assert aten.add not in flop_registry
    assert sdpa_flop_count((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5)) == 4 * 2 * 3 * 4 * 6 * 5
    query = torch.ones(1, 2, 4, 8, requires_grad=True)
    with Recorded() as seen:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    private = "aten::_scaled_dot_product_flash_attention_for_cpu"
    calls = {name: args for _, name, args, _ in seen.calls if name.startswith(private)}
    assert calls.keys() == {private, f"{private}_backward"}
    assert [t.shape for t in calls[private][:3]] == [query.shape] * 3
    assert [t.shape for t in calls[f"{private}_backward"][1:4]] == [query.shape] * 3


@rests_on_it(
    "packages/lockstep-plan/src/lockstep_plan/simulated.py", "packages/lockstep-plan/src/lockstep_plan/fake_world.py"
)
def test_a_fake_group_sends_nothing_and_shows_its_collectives() -> None:
    """With the backend fake and a FakeStore, one process can be any rank of any world size, and a collective returns at
    once. A dispatch mode sees each collective as an operation of c10d with this name and the group among its arguments,
    which ProcessGroup.unbox takes; the input of all_to_all_single is the second tensor."""
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        pytest.skip("this process has a group")
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        part, whole = torch.ones(2), torch.ones(8)
        calls: dict[str, Any] = {
            "allreduce": lambda: dist.all_reduce(part),
            "broadcast": lambda: dist.broadcast(part, 1),
            "allgather_base": lambda: dist.all_gather_into_tensor(whole, part),
            "allgather": lambda: dist.all_gather([torch.ones(2) for _ in range(4)], part),
            "reduce_scatter_base": lambda: dist.reduce_scatter_tensor(part, whole),
            "alltoall_base": lambda: dist.all_to_all_single(torch.ones(6), torch.ones(8), [0, 1, 2, 3], [2, 2, 2, 2]),
            "send": lambda: dist.send(part, 3),
            "recv": lambda: dist.recv(part, 1),
            "barrier": dist.barrier,
        }
        for name, call in calls.items():
            with Recorded() as seen:
                call()
            ((full, args),) = [(full, args) for space, full, args, _ in seen.calls if space == "c10d"]
            assert full.partition("::")[2].strip("_") == name
            groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
            assert dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0])) == [0, 1, 2, 3]
            if name == "alltoall_base":
                assert [len(a) for a in args if isinstance(a, torch.Tensor)] == [6, 8]
            if name == "send":
                assert args[2] == 3
    finally:
        dist.destroy_process_group()


@rests_on_it("packages/lockstep-plan/src/lockstep_plan/simulated.py")
def test_deepspeed_compares_modules_between_ranks() -> None:
    """DeepSpeed's partitioned_param_coordinator calls assert_ints_same_as_other_ranks, looked up in its module."""
    pytest.importorskip("deepspeed")
    import inspect

    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    assert callable(coordinator.assert_ints_same_as_other_ranks)
    source = inspect.getsource(coordinator.PartitionedParameterCoordinator)
    assert "assert_ints_same_as_other_ranks(" in source


@rests_on_it(
    "src/lockstep/strategies/fsdp2.py",
    "src/lockstep/strategies/sharded_optimizer.py",
    "src/lockstep/strategies/engines/tensor_plans.py",
    "src/lockstep/strategies/engines/layers.py",
    "src/lockstep/distributed/sharded.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/placement.py",
)
def test_meshes_and_sharding_without_communication() -> None:
    """A mesh of several dimensions numbers ranks with the last dimension fastest. mesh[names] is a submesh, get_group
    and get_local_rank take a name, and get_coordinate returns this rank's position. distribute_tensor with
    src_data_rank=None and DTensor.from_local with run_check=False, shape and stride do not communicate; the former cuts
    as torch.chunk does, so that the last ranks may have nothing. parallelize_module takes patterns of names:
    ColwiseParallel shards the rows of a Linear's weight and its bias, RowwiseParallel the columns of the weight and not
    the bias."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        pytest.skip("this process has a group")
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        ranks = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("shard", "tensor")]
        assert ranks == [[0, 2], [2, 3]]
        assert [mesh.get_local_rank(name) for name in ("shard", "tensor")] == [1, 0]
        assert tuple(mesh.get_coordinate() or ()) == (1, 0)
        assert mesh.mesh_dim_names == ("shard", "tensor")
        assert dist.get_process_group_ranks(mesh["tensor"].get_group(0)) == [2, 3]
        assert mesh[("shard",)].shape == (2,)
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("rank",))
        whole = torch.arange(10.0).view(5, 2)
        with Recorded() as seen:
            spread = distribute_tensor(whole, flat, [Shard(0)], src_data_rank=None)
            few = distribute_tensor(whole[:2], flat, [Shard(0)], src_data_rank=None)
            again: Any = DTensor.from_local(
                spread.to_local(), flat, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        assert [name for space, name, _, _ in seen.calls if space in ("c10d", "_c10d_functional")] == []
        assert spread.to_local().tolist() == whole.chunk(4)[2].tolist()
        assert tuple(few.to_local().shape) == (0, 2)
        assert again.shape == whole.shape
        model: Any = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 6), "o": nn.Linear(6, 4)})])}
        )
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.o": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        layer = model["layers"][0]
        kinds = [
            getattr(part, "placements", (None,))[0] for part in (*layer["up"].parameters(), *layer["o"].parameters())
        ]
        assert kinds[:3] == [Shard(0), Shard(0), Shard(1)]
        assert kinds[3].is_replicate()
        assert layer["up"].weight.to_local().shape == (3, 4)
        assert not Shard(0).is_replicate()
    finally:
        dist.destroy_process_group()
