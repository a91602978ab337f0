"""Facts about torch's collectives and engines, observed in three processes, for `tests/assumptions/`.

In: nothing. Out: `facts()`, name -> observation of each rank; started once per test process. No lockstep.
"""

# No `from __future__ import annotations` here: DDP reads a communication hook's annotations.

import functools
import json
import os
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
from torch import nn

RANKS = 3
OCTETS = torch.tensor([1.0, -0.0, float("nan"), 1e-45, -1e30])
SEEN: dict[str, Callable[[int, Path], Any]] = {}


def fact(see: Callable[[int, Path], Any]) -> Callable[[int, Path], Any]:
    SEEN[see.__name__] = see
    return see


def facts() -> dict[str, list[Any]]:
    """Observations of each rank, by the names of the functions below. Errors: the error of the first call, each
    time."""
    seen = _facts()
    if isinstance(seen, Exception):
        raise seen
    return seen


@functools.cache
def _facts() -> dict[str, list[Any]] | Exception:
    try:
        return _run()
    except Exception as error:
        return error


def _run() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_look, (folder,), nprocs=RANKS, start_method="spawn")
        seen = [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]
    return {name: [each[name] for each in seen] for name in seen[0]}


def _look(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    room = Path(folder)
    options: dict[str, Any] = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{room / 'store'}", **options)
    seen = {}
    for name, see in SEEN.items():
        seen[name] = see(rank, room)
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{room / 'again'}", **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    seen["formed_again"] = total.item()
    dist.barrier()
    if rank < RANKS - 1:  # the last rank leaves
        try:
            dist.all_reduce(torch.ones(8))
            seen["rank_lost"] = ""
        except RuntimeError as error:
            seen["rank_lost"] = str(error)
        seen["sends"] = _sends_and_shut_sockets(1 - rank)
    else:
        seen["rank_lost"], seen["sends"] = "", []
    (room / f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    os._exit(0)


def _sends_and_shut_sockets(other: int) -> list[Any]:
    """Return two errors: of a send to a rank that has left, and of a thread that waits for another rank when this
    process shuts down its sockets."""
    group: Any = dist.distributed_c10d._get_default_group()

    def raised(call: Callable[[], Any]) -> str:
        try:
            call()
        except RuntimeError as error:
            return type(error).__name__
        return ""

    def send(rank: int) -> str:
        return raised(lambda: group.send([torch.zeros(1)], rank, 7))

    ended: list[Any] = [send(RANKS - 1)]
    waits = threading.Thread(
        target=lambda: ended.append(raised(lambda: group.recv([torch.zeros(1)], other, 8).wait())), daemon=True
    )
    waits.start()
    time.sleep(0.05)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            inside = each.family in (socket.AF_INET, socket.AF_INET6)
            if inside and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # that would end the process
                each.shutdown(socket.SHUT_RDWR)
    after = send(other)
    waits.join(20)
    return [*ended, after]


def bits(tensor: torch.Tensor) -> list[int]:
    kind = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().contiguous().view(kind).flatten().tolist()


@fact
def sum_at_odd_sizes(rank: int, _: Path) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(rank)
    summed = []
    for size in (1, 5, 1001):
        numbers = torch.randn(size, generator=drawn)
        dist.all_reduce(numbers)
        summed.append(bits(numbers))
    return summed


@fact
def sum_of_integers(rank: int, _: Path) -> list[int]:
    numbers = torch.tensor([2**53 + rank, -rank])
    dist.all_reduce(numbers)
    return numbers.tolist()


@fact
def sum_of_one_and_zeros(rank: int, _: Path) -> list[int]:
    held = OCTETS.view(torch.int32).clone() if rank == 1 else torch.zeros(5, dtype=torch.int32)
    dist.all_reduce(held)
    return held.tolist()


@fact
def greatest_integer(rank: int, _: Path) -> int:
    number = torch.tensor([2**53 + rank])
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number)


@fact
def sum_of_a_column(rank: int, _: Path) -> list[float]:
    column = torch.arange(12.0).view(4, 3)[:, 0]
    dist.all_reduce(column)
    return column.tolist()


@fact
def gathered_bits(rank: int, _: Path) -> list[list[int]]:
    boxes = [torch.empty(5) for _ in range(RANKS)]
    dist.all_gather(boxes, OCTETS * (1 if rank == 1 else 0))
    return [bits(box) for box in boxes]


@fact
def broadcast_bits(rank: int, _: Path) -> list[list[int]]:
    sent = []
    for kind in (torch.float32, torch.bfloat16):
        box = OCTETS.to(kind) if rank == 0 else torch.ones(5, dtype=kind)
        dist.broadcast(box, src=0)
        sent.append(bits(box))
    return sent


@fact
def uneven_all_to_all(rank: int, _: Path) -> list[float]:
    """Rank r sends r + 1 numbers to each rank."""
    mine = torch.arange(float(RANKS * (rank + 1))) + 100 * rank
    box = torch.empty(sum(r + 1 for r in range(RANKS)))
    dist.all_to_all_single(box, mine, [r + 1 for r in range(RANKS)], [rank + 1] * RANKS)
    return box.tolist()


@fact
def messages_in_order(rank: int, _: Path) -> list[float]:
    to, of = (rank + 1) % RANKS, (rank - 1) % RANKS
    boxes = [torch.empty(n) for n in (3, 1, 2)]
    works = [dist.P2POp(dist.isend, torch.full((n,), 10.0 * rank + n), to) for n in (3, 1, 2)]
    works += [dist.P2POp(dist.irecv, box, of) for box in boxes]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return [number for box in boxes for number in box.tolist()]


@fact
def gathered_objects(rank: int, _: Path) -> list[Any]:
    boxes: list[Any] = [None] * RANKS
    dist.all_gather_object(boxes, {"rank": rank, "none": None, "whole": 2**70})
    return boxes


@fact
def reduce_scattered(rank: int, _: Path) -> list[float]:
    box = torch.empty(2)
    dist.reduce_scatter_tensor(box, torch.arange(6.0))
    return box.tolist()


@fact
def rows_of_uneven_shards(rank: int, _: Path) -> list[Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    layer = nn.Linear(2, 5)
    whole = bits(layer.weight)
    fully_shard(layer)
    assert isinstance(layer.weight, DTensor)
    return [layer.weight.to_local().shape[0], bits(layer.weight.full_tensor()) == whole]


@fact
def fsdp_gradient(rank: int, _: Path) -> list[Any]:
    """Gradients of 1, 2 and 3; after a backward without sync; their dtype under bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def gradient(policy: MixedPrecisionPolicy, accumulate: bool = False, summed: bool = False) -> Any:
        layer = nn.Linear(1, RANKS, bias=False)
        fully_shard(layer, mp_policy=policy)
        if summed:
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        if accumulate:
            layer.set_requires_gradient_sync(False)
            layer(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert layer.weight.grad is None
            layer.set_requires_gradient_sync(True)
        layer(torch.full((1, 1), rank + 1.0)).sum().backward()
        return layer.weight.grad

    plain = MixedPrecisionPolicy()
    narrow = gradient(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return [
        gradient(plain).full_tensor().flatten().tolist(),
        gradient(plain, summed=True).full_tensor().flatten().tolist(),
        gradient(plain, accumulate=True).full_tensor().flatten().tolist(),
        str(narrow.to_local().dtype),
    ]


@fact
def parts_of_fsdp(rank: int, _: Path) -> list[Any]:
    """Names of FSDP2's groups; in forward and before reduction, which weights are gathered and where gradients are."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    state = model[0]._get_fsdp_state()
    (group,) = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    parts, reduced, seen = group.fsdp_params, group.post_backward, []

    def post_backward(*arguments: Any) -> None:
        seen.append([[p._unsharded_param.grad is not None, p.sharded_param.grad is not None] for p in parts])
        reduced(*arguments)

    def gathered(module: nn.Module, _: Any) -> None:
        seen.append([part._unsharded_param is own for part, own in zip(parts, module.parameters(), strict=True)])

    marks = [module._is_fsdp_managed_module for module in model.modules()]
    own = [part.sharded_param is p for part, p in zip(parts, model[0].parameters(), strict=True)]
    before = [hasattr(part, "_unsharded_param") for part in parts]
    group.post_backward = post_backward
    model[0].register_forward_pre_hook(gathered)
    model(torch.ones(1, 2)).sum().backward()
    seen.append([[p._unsharded_param.grad is not None, p.sharded_param.grad is not None] for p in parts])
    return [marks, own, before, *seen, [part._param_fqn for part in parts]]


@fact
def messages_in_a_group(rank: int, _: Path) -> list[Any]:
    """Return what ranks 0 and 2 send each other as ranks 0 and 1 of a group of their own, and the group's ranks; the
    tensors of all ranks, gathered into one."""
    group = dist.new_group([2, 0])
    seen: list[Any] = []
    if rank != 1:
        box, peer = torch.empty(1), 1 - dist.get_group_rank(group, rank)
        works = [dist.P2POp(dist.irecv, box, group=group, group_peer=peer)]
        works.append(dist.P2POp(dist.isend, torch.tensor([rank + 1.0]), group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(works):
            work.wait()
        seen = [box.item(), dist.get_process_group_ranks(group)]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    every = torch.empty(RANKS * 2, 2)
    gather(every, torch.full((2, 2), float(rank)))
    work = dist.isend(torch.ones(1), 0) if rank else None
    if work is not None:
        work.wait()
    else:
        for of in range(1, RANKS):
            dist.recv(torch.empty(1), of)
    return [seen, every[:, 0].tolist()]


@fact
def own_reduce_scatter(rank: int, _: Path) -> list[Any]:
    """Observe a custom reduce-scatter of FSDP2: its arguments, the resulting gradient, and the positions of FSDP's
    hooks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    calls: list[Any] = []

    class Own(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            slots = input_tensor.view(RANKS, -1)
            calls.append([output_tensor.numel(), slots[:, 0].tolist(), group.size(), async_op])
            output_tensor.fill_(rank + 5.0)

    layer: Any = nn.Linear(1, RANKS, bias=False)
    layer.register_forward_pre_hook(lambda *_: None, prepend=True)
    fully_shard(layer)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_custom_reduce_scatter(Own())
    hooks = [getattr(hook, "__qualname__", "") for hook in layer._forward_pre_hooks.values()]
    layer(torch.tensor([[1.0]])).backward(torch.tensor([[1.0, 2.0, 3.0]]) * (rank + 1))
    return [
        calls,
        layer.weight.grad.full_tensor().flatten().tolist(),
        hooks[0],
        type(layer._forward_pre_hooks).__name__,
    ]


@fact
def output_that_hides_tensors(rank: int, _: Path) -> list[bool]:
    """Return, for outputs of FSDP2 within a list, a mapping, a dataclass and an object of another class, whether the
    gradient was reduced into the shard."""
    import dataclasses

    from torch.distributed.fsdp import fully_shard

    @dataclasses.dataclass
    class Plain:
        value: torch.Tensor

    class Other:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Model(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(1, RANKS), kind

        def forward(self, x: torch.Tensor) -> Any:
            return self.kind(self.layer(x))

    seen = []
    for kind, value in (
        (lambda t: [t], lambda o: o[0]),
        (lambda t: {"a": t}, lambda o: o["a"]),
        (Plain, lambda o: o.value),
        (Other, lambda o: o.value),
    ):
        model = Model(kind)
        fully_shard(model)
        value(model(torch.ones(1, 1))).sum().backward()
        seen.append(model.layer.weight.grad is not None and hasattr(model.layer.weight.grad, "to_local"))
    return seen


@fact
def parts_of_flat_parameters(rank: int, _: Path) -> list[list[Any]]:
    """Return, for FSDP1's flat parameters as one tensor and as the original ones: names, shapes, and whether each part
    is the slice of the whole weight that `_shard_param_infos` says."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    seen = []
    for originals in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3, bias=False))
        whole = {name: p.detach().clone().flatten() for name, p in model.named_parameters()}
        wrapper: Any = FullyShardedDataParallel(model, use_orig_params=originals, device_id=torch.device("cpu"))
        handle, right = wrapper._handle, []
        flat = handle.flat_param
        for at, (name, shape, info) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
            first, size = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
            place = info.offset_in_shard if info.in_shard else 0
            part = flat._params[at].detach().flatten() if originals else flat.detach()[place : place + size]
            right.append([name, list(shape), torch.equal(part, whole[name][first : first + size])])
        seen.append([handle.uses_sharded_strategy, flat._params is None, right])
    return seen


@fact
def ddp_gradient(rank: int, _: Path) -> list[Any]:
    """Gradients of 1, 2 and 3: averaged; after a step in no_sync; with a hook that adds; weights of rank 0."""

    def replica(**options: Any) -> tuple[nn.Linear, nn.parallel.DistributedDataParallel]:
        torch.manual_seed(rank)
        layer = nn.Linear(1, 1, bias=False)
        return layer, nn.parallel.DistributedDataParallel(layer, **options)

    x = torch.full((1, 1), rank + 1.0)
    layer, model = replica()
    torch.manual_seed(0)
    same = torch.equal(layer.weight, nn.Linear(1, 1, bias=False).weight)
    model(x).sum().backward()
    assert layer.weight.grad is not None
    averaged = layer.weight.grad.item()
    layer.weight.grad = None
    with model.no_sync():
        model(x).sum().backward()
    alone = layer.weight.grad.item()
    model(x).sum().backward()
    accumulated = layer.weight.grad.item()
    layer, model = replica(gradient_as_bucket_view=True)
    buckets: list[torch.Tensor] = []
    own: list[bool] = []

    def added(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.buffer())
        ((weight, gradient),) = zip(bucket.parameters(), bucket.gradients(), strict=True)
        own.extend([weight is layer.weight, gradient.item() == rank + 1, gradient.data_ptr() == buckets[-1].data_ptr()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, added)
    model(x).sum().backward()
    assert layer.weight.grad is not None
    in_bucket = layer.weight.grad.untyped_storage().data_ptr() == buckets[-1].untyped_storage().data_ptr()
    return [same, averaged, alone, accumulated, layer.weight.grad.item(), in_bucket, own]


@fact
def parts_of_ddp(rank: int, _: Path) -> list[Any]:
    """Return, for a DDP that ignores one of its weights: its record of that weight, its hooks before and after one is
    registered, and whether gradients of both weights are averaged."""
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    model.forward = lambda x: model["a"](x) + model["b"](x)  # type: ignore[method-assign]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["b.weight"])
    wrapper: Any = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=3)
    wrapper(torch.full((1, 1), rank + 1.0)).sum().backward()
    seen = [list(wrapper.parameters_to_ignore), wrapper.process_group.size(), wrapper.bucket_bytes_cap]
    hooks = [len(wrapper._comm_hooks)]
    wrapper.register_comm_hook(None, dist.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook)
    gradients = [p.grad.item() for p in model.parameters() if p.grad is not None]
    return [*seen, [*hooks, len(wrapper._comm_hooks)], gradients]


@fact
def checkpoint_of_unequal_values(rank: int, room: Path) -> list[float]:
    import torch.distributed.checkpoint as dcp

    dcp.save({name: torch.full((4,), float(rank)) for name in "abc"}, checkpoint_id=str(room / "unequal"))
    loaded = {name: torch.full((4,), -1.0) for name in "abc"}
    dcp.load(loaded, checkpoint_id=str(room / "unequal"))
    return [loaded[name][0].item() for name in "abc"]


@fact
def checkpoint_of_shards(rank: int, room: Path) -> bool:
    """Return whether each rank can read all shards of three ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    whole = torch.arange(10.0).view(5, 2)
    shard = distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    dcp.save({"a": shard}, checkpoint_id=str(room / "shards"))
    loaded = {"a": torch.zeros(5, 2)}
    dcp.load(loaded, checkpoint_id=str(room / "shards"), no_dist=True)
    return torch.equal(loaded["a"], whole)


@fact
def sampled_rows(rank: int, _: Path) -> list[list[int]]:
    from torch.utils.data.distributed import DistributedSampler

    sampler: DistributedSampler[int] = DistributedSampler(range(7), shuffle=False)
    drawn: DistributedSampler[int] = DistributedSampler(range(7), seed=3)
    orders = [list(drawn), list(drawn)]
    drawn.set_epoch(1)
    return [list(sampler), *orders, list(drawn)]


@fact
def norm_of_shards(rank: int, _: Path) -> list[Any]:
    """Norm of FSDP2's gradients: as a number, from shards, of the gathered gradient; the error raised by formatting
    it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    layer = nn.Linear(2, 5, bias=False)
    fully_shard(layer)
    layer(torch.full((1, 2), rank + 1.0)).square().sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    whole = layer.weight.grad.full_tensor().norm().item()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
    clipped = layer.weight.grad.full_tensor().norm().item()
    try:
        said = f"{norm:.3f}"
    except TypeError:
        said = "TypeError"
    return [isinstance(norm, DTensor), float(norm), whole, clipped, said]


@fact
def gathered_for_metrics(rank: int, _: Path) -> dict[str, list[int]] | None:
    """Result of Accelerate's gather_for_metrics for 10 rows, as a dataset and as a stream; None without Accelerate."""
    try:
        from accelerate import Accelerator, DataLoaderConfiguration
        from datasets import Dataset
    except ImportError:
        return None
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "ACCELERATE_USE_CPU": "1"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rows = Dataset.from_dict({"x": list(range(10))})
    seen = {}
    for name, data in (("data set", rows.with_format("torch")), ("stream", rows.to_iterable_dataset())):
        loader: Any = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))  # type: ignore[arg-type]
        seen[name] = [x for batch in loader for x in accelerator.gather_for_metrics(batch["x"]).tolist()]
    return seen


@fact
def static_graph(rank: int, _: Path) -> list[Any]:
    found: list[Any] = []
    for primed in (False, True):
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        ddp = nn.parallel.DistributedDataParallel(model, static_graph=True)
        if primed:
            (0 * ddp(torch.ones(1, 2)).sum()).backward()
            model.weight.grad = None
        try:
            for _step in range(2):
                with ddp.no_sync():
                    ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
                ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
                assert model.weight.grad is not None
                found.append(model.weight.grad.flatten().tolist())
                model.weight.grad = None
        except RuntimeError as error:
            found.append(type(error).__name__)
    return found
