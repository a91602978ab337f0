"""Assumptions about private parts of torch's FSDP, DDP, pipelining and process groups, in one process."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from support.assumed import rests_on_it

NEEDS_2_13 = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="lockstep's pipeline refuses torch before 2.13"
)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "100")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@rests_on_it("src/lockstep/strategies/engines/fsdp.py")
def test_how_transformers_detects_a_sharded_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers runs all layers of a module for which is_fsdp_managed_module is true: `_is_fsdp_managed_module` is
    set, or the module is a FullyShardedDataParallel. It is false if the attribute is False."""
    from transformers.integrations.fsdp import is_fsdp_managed_module

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FullyShardedDataParallel=nn.Identity))
    module: Any = nn.Linear(2, 3)  # the class above stands for one that takes a second to import
    assert not is_fsdp_managed_module(module)
    module._is_fsdp_managed_module = True
    assert is_fsdp_managed_module(module)
    module._is_fsdp_managed_module = False
    assert not is_fsdp_managed_module(module)
    assert is_fsdp_managed_module(nn.Identity())


@NEEDS_2_13
@rests_on_it("src/lockstep/strategies/engines/pipelining.py", "src/lockstep/strategies/pipeline.py")
def test_a_schedule_with_these_flags_exchanges_no_shapes() -> None:
    """With `_stage_forward_initialized` and `_stage_backward_initialized` set (`_stages_...` for a schedule of several
    stages), `_step_microbatches` negotiates no shapes, and gives each micro-batch its own keyword arguments and target.
    ScheduleGPipe runs all forwards first; Schedule1F1B on one stage runs each backward right after its forward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    class Times(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, *, micro: torch.Tensor) -> torch.Tensor:
            return (micro * self.weight).sum()

    stage: Any = PipelineStage(Times(), 0, 1, torch.device("cpu"))
    stage._runtime_validate, stage.has_backward, stage.chunks = False, True, 2
    stage._stage_meta.inputs = stage._stage_meta.input_grads = ()
    stage.args_recv_info, stage.grad_recv_info = {0: (), 1: ()}, {0: (), 1: ()}
    stage.act_send_info, stage.grad_send_info = {0: []}, []
    stage._prepare_forward_infra = stage._prepare_backward_infra = None  # a call would raise
    order: list[Any] = []

    def loss(output: torch.Tensor, _: None) -> torch.Tensor:
        order.append(output.item())
        output.register_hook(lambda _: order.append("backward"))
        return output

    several: Any = ScheduleInterleaved1F1B([stage], 2, loss_fn=loss)
    assert (several._stages_forward_initialized, several._stages_backward_initialized) == (False, False)
    for kind, expected in (
        (Schedule1F1B, [2.0, "backward", 5.0, "backward"]),
        (ScheduleGPipe, [2.0, 5.0, "backward", "backward"]),
    ):
        schedule: Any = kind(stage, 2, loss_fn=loss, scale_grads=False)
        assert (schedule._stage_forward_initialized, schedule._stage_backward_initialized) == (False, False)
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        stage.clear_runtime_states()
        stage.submod.weight.grad = None
        schedule._step_microbatches(
            kwarg_mbs=[{"micro": torch.ones(2)}, {"micro": torch.ones(5)}], target_mbs=[None] * 2, return_outputs=False
        )
        assert order == expected
        assert stage.submod.weight.grad.item() == 7.0
        order.clear()


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/replay.py")
def test_device_ids_of_a_model_on_the_cpu() -> None:
    """`device_ids` of DDP around a model on the CPU is None, of DataParallel without a device an empty list."""
    assert nn.parallel.DistributedDataParallel(nn.Linear(1, 1)).device_ids is None
    if not torch.cuda.is_available():
        assert nn.DataParallel(nn.Linear(1, 1)).device_ids == []


@NEEDS_2_13
@rests_on_it("src/lockstep/strategies/engines/pipelining.py")
def test_descriptions_of_received_tensors() -> None:
    """A stage's inputs are described by `_RecvInfo`s: name, source rank, buffer, and a `_TensorMeta`, which from_tensor
    makes from a tensor on the meta device with shape, strides, dtype and requires_grad."""
    from torch.distributed.pipelining._utils import _TensorMeta
    from torch.distributed.pipelining.stage import _RecvInfo

    meta = _TensorMeta.from_tensor(torch.empty((2, 3), device="meta", requires_grad=True))
    assert meta == _TensorMeta(torch.Size([2, 3]), (3, 1), torch.float32, True)
    info = _RecvInfo("hidden", 4, torch.ones(2, 3), meta)
    assert (info.input_name, info.source, info.tensor_meta) == ("hidden", 4, meta)
    assert torch.equal(info.buffer, torch.ones(2, 3))  # type: ignore[arg-type]


@rests_on_it("src/lockstep/distributed/torch_internals.py")
def test_groups_stores_and_timeouts_of_the_process() -> None:
    """`_get_default_store` is the default group's store. The keys of `_world.pg_map` are the process's groups, those of
    meshes included. `_set_pg_timeout` sets the timeout of one group only, the default group for None."""
    module: Any = dist.distributed_c10d
    other: Any = dist.new_group([0])
    module._get_default_store().set("key", "value")
    assert module._get_default_store().get("key") == b"value"
    assert {dist.group.WORLD, other} <= set(module._world.pg_map)

    def limit(group: Any) -> float:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    before = limit(other)
    module._set_pg_timeout(timedelta(seconds=77), None)
    assert (limit(dist.group.WORLD), limit(other)) == (77, before)
    module._set_pg_timeout(timedelta(seconds=78), other)
    assert (limit(dist.group.WORLD), limit(other)) == (77, 78)


@rests_on_it("src/lockstep/distributed/torch_internals.py", "src/lockstep/distributed/rendezvous.py")
def test_the_flight_recorder_lists_collectives() -> None:
    """With TORCH_FR_BUFFER_SIZE set before the first group, `_dump_fr_trace_json(True, False)` lists each gloo
    collective with name, number, dtypes and sizes of its inputs, group, and `retired` once it has ended."""
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    if dump is None:
        pytest.skip("torch without its flight recorder")
    dist.all_reduce(torch.ones(2, 3))
    entry = json.loads(dump(True, False))["entries"][-1]
    assert (entry["profiling_name"], entry["retired"]) == ("gloo:all_reduce", True)
    assert (entry["input_dtypes"], entry["input_sizes"]) == (["Float"], [[2, 3]])
    assert entry["process_group"][1] == "default_pg"
    assert entry["collective_seq_id"] >= 1


@rests_on_it("src/lockstep/training/recovery/recovery.py", "src/lockstep/distributed/rendezvous.py")
def test_errors_of_groups_have_one_class() -> None:
    """torch's errors of backends, network and stores are DistErrors, which are RuntimeErrors."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    assert all(issubclass(kind, dist.DistError) for kind in kinds)
    assert issubclass(dist.DistError, RuntimeError)


@rests_on_it("src/lockstep/distributed/torch_internals.py")
def test_parts_of_a_sparse_tensor_are_its_memory() -> None:
    """`_indices` and `_values` of a sparse tensor share its memory, also if it is not coalesced."""
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3), check_invariants=False)
    assert rows._indices().tolist() == [[1, 1]]
    rows._values().fill_(5)
    assert rows.to_dense()[1].tolist() == [10.0] * 3


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_every_rank_plans_the_same_checkpoint() -> None:
    """DefaultSavePlanner.create_local_plan has an item for each tensor, with name, offsets and sizes.
    create_global_plan assigns each replicated tensor to one rank, balanced by bytes, with the same result on every rank
    and unchanged names."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    parts = {"model.a": torch.ones(4, 4), "model.b": torch.ones(3), "optimizer.step.a": torch.tensor(2.0)}
    planners: list[Any] = []
    for rank in range(3):
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(parts), is_coordinator=rank == 0)
        planners.append(planner)
    local = [planner.create_local_plan() for planner in planners]
    seen = []
    for planner in planners:
        plans, _ = planner.create_global_plan(local)
        chunks = [[(item.index.fqn, item.tensor_data.chunk) for item in plan.items] for plan in plans]
        seen.append([[(name, tuple(each.offsets), tuple(each.sizes)) for name, each in of] for of in chunks])
    one, two, three = ("model.a", (0, 0), (4, 4)), ("model.b", (0,), (3,)), ("optimizer.step.a", (), ())
    assert seen == [[[one], [two], [three]]] * 3


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_a_tensor_is_read_from_pieces_of_several_files(tmp_path: Path) -> None:
    """HuggingFaceStorageReader reads a tensor, or a slice of it, whose pieces are in several safetensors files.
    DCP_SHARDING_INFO in the files' headers has each piece's `saved_offsets`; the reader's `fs` lists the files."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import hf_storage
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    whole = torch.arange(10.0).view(5, 2)
    for name, begin, end in (("one", 0, 3), ("two", 3, 5)):
        sharding = json.dumps({"a": {"saved_offsets": [begin, 0]}})
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding}
        save_file({"a": whole[begin:end].clone()}, tmp_path / f"{name}.safetensors", metadata)
    (tmp_path / "three.safetensors").write_bytes(b"of another run")
    reader = hf_storage.HuggingFaceStorageReader(str(tmp_path))
    reader.fs.ls = lambda path: [f"{path}/{name}.safetensors" for name in ("one", "two")]  # type: ignore[method-assign]
    found = reader.read_metadata()
    target = {"a": torch.zeros(5, 2)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(target, found, is_coordinator=True)
    reader.set_up_storage_reader(found, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    assert torch.equal(target["a"], whole)
    kept: Any = found.state_dict_metadata["a"]
    assert (kept.size, kept.properties.dtype) == (torch.Size([5, 2]), torch.float32)


@rests_on_it("src/lockstep/distributed/torch_internals.py", "src/lockstep/distributed/rendezvous.py")
def test_a_gloo_group_has_options_and_a_name() -> None:
    """Options of a gloo group have `_devices`, `_threads` (2) and `_timeout`. create_device takes the name of a network
    interface, and raises RuntimeError if there is none of that name. A group has the group_desc passed to it.
    get_backend is "gloo" for a gloo group, the default group's backend for a new group that names none, and the whole
    string for a backend by devices."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(interface="lo"), kind.create_default_device()]
    assert (len(options._devices), options._threads) == (2, 2)
    options._threads, options._timeout = 1, timedelta(seconds=7)
    assert options._timeout == timedelta(seconds=7)
    with pytest.raises(RuntimeError):
        kind.create_device(interface="none0")
    control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=9), group_desc="control")
    assert (control.group_desc, dist.get_backend(control), dist.get_backend(dist.new_group(None))) == (
        *("control", "gloo", "gloo"),
    )
    both: Any = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(both) == "cpu:gloo"


@rests_on_it("src/lockstep/distributed/world.py")
def test_asynchronous_collectives() -> None:
    """all_reduce and all_gather with async_op return a work object; after its wait() the result is in the tensors.
    broadcast_object_list replaces the items of its list. barrier and broadcast take a group."""
    group: Any = dist.new_group(backend="gloo")
    box, mine = torch.tensor([3]), torch.tensor([1.5, -0.0], dtype=torch.float64)
    boxes = [torch.empty_like(mine)]
    works = [
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group, async_op=True),
        dist.all_gather(boxes, mine, group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert box.tolist() == [3]
    assert torch.equal(boxes[0].view(torch.int64), mine.view(torch.int64))
    held = [{"a": 1}]
    first = held[0]
    dist.broadcast_object_list(held, src=0, group=group)
    assert held == [{"a": 1}]
    assert held[0] is first  # on the source
    dist.broadcast(mine, src=0, group=group)
    dist.barrier(group=group)


@rests_on_it(
    "src/lockstep/strategies/ddp.py",
    "src/lockstep/strategies/engines/accelerated.py",
    "src/lockstep/strategies/engines/zero_config.py",
    "src/lockstep/strategies/fsdp2.py",
)
def test_texts_of_silenced_warnings() -> None:
    """From torch 2.13 on DDP has the option forward_sync_buffers. broadcast_buffers, all_gather_into_tensor and
    reduce_scatter_tensor then give a FutureWarning that contains "deprecated" and the name. An FSDP2 module that
    returns a view gives a UserWarning about it."""
    import warnings

    from torch.distributed.fsdp import fully_shard

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[:]

    view = View()
    fully_shard(view)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1), broadcast_buffers=False)
        dist.all_gather_into_tensor(torch.empty(1), torch.ones(1))
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(1))
        view(torch.ones(1, 2))
    said = [(each.category, str(each.message)) for each in caught]
    patterns = [
        (UserWarning, r"FSDP2-wrapped module .* returned a view", "2.12"),
        (FutureWarning, "`broadcast_buffers` is deprecated", "2.13"),
        (FutureWarning, r".*all_gather_into_tensor", "2.13"),
        (FutureWarning, r".*reduce_scatter_tensor", "2.13"),
    ]
    for kind, pattern, since in patterns:
        there = any(issubclass(category, kind) and re.match(pattern, text) for category, text in said)
        assert there or Version(torch.__version__) < Version(since), (pattern, said)
    names = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    assert ("forward_sync_buffers" in names) is (Version(torch.__version__) >= Version("2.13"))
    assert {"broadcast_buffers", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb"} <= names.keys()


@rests_on_it("src/lockstep/strategies/fsdp2.py", "src/lockstep/strategies/engines/fsdp.py")
def test_options_and_methods_of_fsdp() -> None:
    """MixedPrecisionPolicy takes the dtypes of weights, of the reduction and of outputs, then cast_forward_inputs.
    fully_shard takes mesh, reshard_after_forward, mp_policy and offload_policy by name. An FSDPModule has these
    methods; its weights are complete after unshard and sharded again after reshard."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    names = ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
    assert list(inspect.signature(MixedPrecisionPolicy).parameters) == names
    model: Any = nn.Sequential(nn.Linear(2, 2))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (1,)),
        reshard_after_forward=True,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    assert isinstance(OffloadPolicy(), object)
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPSequential"
    model.unshard()
    assert not isinstance(model[0].weight, DTensor)
    assert model[0].weight.dtype == torch.bfloat16
    model.reshard()
    assert isinstance(model[0].weight, DTensor)
    assert all(callable(getattr(model, name)) for name in ("set_requires_all_reduce", "set_custom_reduce_scatter"))


@NEEDS_2_13
@rests_on_it("src/lockstep/strategies/engines/pipelining.py")
def test_methods_of_a_pipeline_stage() -> None:
    """PipelineStage has these methods, whose first argument is the number of the micro-batch. forward_one_chunk stores
    (tuple of outputs, inputs) in `fwd_cache` under that number, and backward_one_chunk removes it. A CPU's random state
    has 5056 bytes, and set_rng_state takes it."""
    from torch.distributed.pipelining import PipelineStage

    for name in ("get_fwd_recv_ops", "_retrieve_recv_grads", "get_bwd_recv_ops", "forward_one_chunk"):
        first = list(inspect.signature(getattr(PipelineStage, name)).parameters)[1]
        assert first in ("fwd_chunk_id", "bwd_chunk_id")
    assert list(inspect.signature(PipelineStage.backward_one_chunk).parameters)[1] == "bwd_chunk_id"
    source = inspect.getsource(PipelineStage.__mro__[1])
    assert "self.fwd_cache[fwd_chunk_id] = (" in source
    assert "self.fwd_cache.pop(bwd_chunk_id)" in source
    state = torch.get_rng_state()
    assert (tuple(state.shape), state.dtype) == ((5056,), torch.uint8)
    torch.set_rng_state(state.clone())
    assert torch.equal(torch.get_rng_state(), state)
