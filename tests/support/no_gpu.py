"""Training steps on a device that torch calls `cuda`, without a GPU: tensors without data, a rank without peers, and a
record of every operation that the host would wait for.

In: `python no_gpu.py LIBRARY CASES ANSWERS`, with `tests` in PYTHONPATH; the library is compiled from `no_gpu.cpp`, and
must be loaded before torch. Out: a JSON file per case, made in a forked process. The stand-ins for torch.cuda replace
calls of a driver: streams, events, the generator; no operations.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    _lib = Path(importlib.util.find_spec("torch").origin).parent / "lib"  # type: ignore[union-attr, arg-type]
    ctypes.CDLL(str(_lib / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(sys.argv[1])

import numpy as np
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lockstep

DEVICE = torch.device("cuda", 0)
IN_EVERY_CASE = (  # imported once, before the cases are forked
    "lockstep.training.preload",
    "lockstep.training.data_loader",
    "lockstep.strategies.single",
    "lockstep.strategies.fsdp2",
    "lockstep_plan.fake_world",
    "lockstep_plan.simulated",
    "support.harness",
    "support.label_runs",
    "support.task_runs",
    "transformers.models.gpt2.modeling_gpt2",
)
aten = torch.ops.aten
VALUES = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero, aten.masked_select, aten.bincount}
VALUES |= {aten.unique_dim, aten._unique2, aten.unique_consecutive}  # their result, or its size, depends on data


OURS = f"{Path(lockstep.__file__).parent}/"


def place() -> str:
    """The caller: lockstep's innermost line, or the package within an engine."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename
        if path.startswith(OURS):
            return f"{path.removeprefix(OURS)}:{frame.name}"
        if frame.name == "planted":
            return "no_gpu.py:planted"
        for engine in ("deepspeed", "accelerate", "transformers", "torch/distributed"):
            if f"/site-packages/{engine}/" in path:
                return engine
    return "nobody"


class Watch(TorchDispatchMode):
    """Records each operation on a cuda tensor that the host waits for, while `on`, and answers it."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.step = 0
        self.waits: Counter[str] = Counter()
        self.scalars: Counter[str] = Counter()  # host numbers in device operations, which cost nothing
        self.operations = 0
        self.names: Counter[str] = Counter()
        self.products: set[int] = set()  # sizes of 16-bit matrix products

    def wait(self, what: str) -> None:
        if self.on:
            self.waits[f"{what} {place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in tensors if t.device.type == "cuda"]
        name = func._schema.name
        if func.overloadpacket is aten._pin_memory:
            pinned = args[0].clone()
            pinned.is_page_locked = True
            return pinned
        if func.overloadpacket is aten.is_pinned:
            return hasattr(args[0], "is_page_locked")
        if there:
            self.operations += self.on
            if self.on:
                self.names[name] += 1
                if name in ("aten::mm", "aten::addmm") and there[-1].dtype in (torch.bfloat16, torch.float16):
                    self.products |= {size for t in there for size in t.shape}
            if self.on and any(t.dim() == 0 for t in tensors if t.device.type == "cpu"):
                self.scalars[name] += 1
        if func.overloadpacket in VALUES and (there or isinstance(tensors[0], FakeTensor)):
            if there:
                self.wait(name)
            return answer(func, tensors)
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [i for i in args[1] if isinstance(i, Tensor)]
            if args[0].device.type == "cuda" and any(i.device.type == "cpu" for i in indices):
                self.wait(f"{name} by the host's")
        if func.overloadpacket is aten._to_copy and tensors:
            to = torch.device(kwargs.get("device") or tensors[0].device)
            self.across(name, tensors[0], to, kwargs.get("non_blocking", False))
        if func.overloadpacket is aten.copy_:
            self.across(name, args[1], args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if on_the_host(func, tensors, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def across(self, name: str, source: Tensor, to: torch.device, non_blocking: bool) -> None:
        """Copy between host and device. The host waits unless it is non-blocking from page-locked memory."""
        kinds = source.device.type, to.type
        if kinds == ("cpu", "cuda") and not (non_blocking and hasattr(source, "is_page_locked")):
            self.wait(f"{name} to the device")
        elif kinds == ("cuda", "cpu") and not non_blocking:
            self.wait(f"{name} to the host")


def on_the_host(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
    """Whether an operation is really computed: operations on host integers are, because they determine shapes."""
    if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
        return False
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    dtype = kwargs.get("dtype")
    return bool(tensors) or func is aten.arange.default or (dtype is not None and not dtype.is_floating_point)


def answer(func: Any, tensors: list[Tensor]) -> Any:
    """Answer without data: everything is finite, and nothing is found."""
    first = tensors[0]
    if func.overloadpacket is aten._local_scalar_dense:
        return True if first.dtype is torch.bool else 0.0 if first.is_floating_point() else 0
    if func.overloadpacket is aten.nonzero:
        return torch.empty(0, first.dim(), dtype=torch.int64, device=first.device)
    if func.overloadpacket is aten.equal:  # whether weights are tied, when a model is built
        return first is tensors[1]
    raise NotImplementedError(f"{func}: what it gives depends on numbers that are not there")


# -- torch.cuda's Python functions that call a driver
# -------------------------------------------------------------------

WATCH = Watch()


class Stream:
    """A stream that runs in order and takes no time."""

    stream_id = cuda_stream = 0
    device, device_index, device_type = DEVICE, 0, 1
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WATCH.wait("stream.synchronize")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded: int | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded = WATCH.step

    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        if self.recorded is not None:
            WATCH.wait(f"event.synchronize of {'this step' if self.recorded == WATCH.step else 'a step before'}")


STATE = torch.zeros(16, dtype=torch.uint8)
ONE = Stream()


def pretended(stack: ExitStack) -> None:
    """Pretend to have one GPU."""
    instead: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "no GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: ONE,
        "default_stream": lambda device=None: ONE,
        "stream": lambda stream: ONE,
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: WATCH.wait("torch.cuda.synchronize"),
        "get_rng_state": lambda device=None: STATE.clone(),  # kept by the host
        "set_rng_state": lambda state, device=None: None,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="no GPU", total_memory=80 << 30, major=9, minor=0
        ),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, value in instead.items():
        stack.enter_context(patch.object(torch.cuda, name, value))
    stack.enter_context(patch.object(Tensor, "record_stream", lambda *_: None))
    # transformers takes a tensor without data for one that is being traced, and then asks it for none
    stack.enter_context(patch("transformers.utils.import_utils.is_fake_tensor", lambda x: False))
    for name in ("range_push", "range_pop"):
        stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: 0))
    stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))


class NoNumbers(FakeTensorMode):
    """Behaves as torch without a device."""

    avoid_device_init = True  # type: ignore[assignment]


class Reducer:
    """DistributedDataParallel's reducer, which keeps its first buckets: ranks agree on others by data."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


# -- a case
# -------------------------------------------------------------------------------------------------------------


def run_of(case: dict[str, Any]) -> Any:
    """Run of a case; a text classification by default."""
    from support import label_runs, task_runs
    from support.harness import tiny

    keys, kind = (*case["keys"], "launch.device=cuda"), case.get("kind")
    if kind is None:
        return tiny(*keys)
    made = task_runs if kind in task_runs.TASKS else label_runs
    return made.make(Path(case["data"]), kind, *keys)


def prepared(case: dict[str, Any], numbers: NoNumbers) -> tuple[Any, Any, list[Any]]:
    """Task, unbuilt strategy and this rank's batches on the host."""
    from lockstep.data.job import Job
    from lockstep.tasks.task import UsesReference, make_task
    from lockstep.training.data_loader import StepLoader
    from lockstep.training.resolve import resolve_strategy
    from lockstep_plan.fake_world import FakeWorld

    ranks, rank = case["ranks"], case["rank"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", DS_ACCELERATOR="cuda")
    run = run_of(case)
    task = make_task(Job.of(run).with_data())
    if isinstance(task, UsesReference):
        for split, columns in task.splits.items():
            task.reference_outputs[split] = np.zeros((len(columns), task.reference_size))
    found = resolve_strategy(run, ranks)
    world = FakeWorld(run).on_machines(case["per_node"])
    assert world.device == DEVICE, world.device
    with numbers, WATCH:
        strategy = found(Job.of(run, world.size), world)
    feed = StepLoader(task, strategy.own_micro_batches(), torch.device("cpu"))
    times, summed = run.micro_batches // len(feed.indices), strategy.totals.sum_over_ranks

    def sums(tensor: Tensor) -> Tensor:
        """Compute a sum over ranks as if all ranks had this rank's values."""
        total = summed(tensor)
        return total if isinstance(total, FakeTensor) else total * times

    strategy.totals.sum_over_ranks = sums
    return task, strategy, [feed.make(step) for step in range(case["steps"])]


def build(task: Any, strategy: Any, stack: ExitStack) -> None:
    """Build with a model without data, bypassing C++ of torch and DeepSpeed that would read it."""
    from torch.nn.parallel import distributed as parallel

    from lockstep.strategies import fsdp2
    from lockstep_plan import simulated

    stage_3 = strategy.run.strategy.name == "zero3"
    model, place = task.model, DEVICE if stage_3 else None  # DeepSpeed moves it by `.data`, which is not recorded here

    def make(empty: bool = False) -> Any:
        whole = partial(model, empty=True)
        return simulated.on_meta(whole) if empty else simulated.emptied(whole, place)

    task.model = make
    # by `.data`, as FSDP does
    stack.enter_context(patch.object(fsdp2, "roomy", lambda model: simulated.emptied(lambda: model, DEVICE)))
    stack.enter_context(patch.object(parallel, "_verify_param_shape_across_processes", lambda *_: None))
    stack.enter_context(simulated.nobody_disagrees("deepspeed" in strategy.needs, "cuda"))
    strategy.build(task)
    elsewhere = {n: str(p.device) for n, p in strategy.model.named_parameters() if p.device != DEVICE}
    assert not elsewhere or stage_3, elsewhere
    if (ddp := getattr(strategy, "ddp", None)) is not None:
        ddp.reducer = Reducer(ddp.reducer)
        ddp.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # by a clock of the device


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Operations that the host waited for, by step of a case."""
    numbers = NoNumbers(allow_non_fake_inputs=True)
    task, strategy, batches = prepared(case, numbers)
    with numbers, WATCH, ExitStack() as stack:
        build(task, strategy, stack)
        if "planted" in case:
            strategy.observer = planting()
        waits = []
        for step, batch in enumerate(batches):
            batch = batch.to(DEVICE)
            WATCH.on, WATCH.step = True, step
            WATCH.waits.clear()
            try:
                result = strategy.train_step(batch, 1e-3)
            except RuntimeError:
                if "planted" not in case:
                    raise
                return {"raised": traceback.format_exc(), "waits": WATCH.waits, "scalars": WATCH.scalars}
            WATCH.on = False
            waits.append(dict(WATCH.waits))
            assert result.loss.device == result.grad_norm.device == DEVICE
    return {
        "waits": waits,
        "scalars": WATCH.scalars,
        "operations": WATCH.operations,
        "names": WATCH.names,
        "products": sorted(WATCH.products),
    }


def planting() -> Any:
    """An observer that does forbidden things."""
    from lockstep.strategies.observer import StepObserver

    class Planting(StepObserver):
        def reduced(self, gradient: Any) -> None:
            planted()

    return Planting()


def planted() -> None:
    """Forbidden operations in the middle of an update."""
    there = torch.ones(3, device=DEVICE)
    event = torch.cuda.Event()
    event.record()
    there.sum().item()
    torch.tensor([1, 2, 3], device=DEVICE)
    torch.arange(3).to(DEVICE, non_blocking=True)  # memory that is not page-locked
    there.cpu()
    (there > 0).nonzero()
    event.synchronize()
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    there * torch.full((), 2.0)  # allowed, and counted
    there + torch.arange(3)


def main() -> None:
    for name in IN_EVERY_CASE:
        importlib.import_module(name)
    with suppress(ImportError):
        import bitsandbytes  # noqa: F401 - PEFT imports it, and in front of a device it wants CUDA's own streams

    cases, answers = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    for number, case in enumerate(cases):
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if not (answers / f"{number}.json").exists():
                (answers / f"{number}.json").write_text(json.dumps({"error": f"ended with {status}"}))
            continue
        try:
            with ExitStack() as stack:
                pretended(stack)
                told = trained(case)
        except BaseException:
            told = {"error": traceback.format_exc()}
        (answers / f"{number}.json").write_text(json.dumps(told))
        os._exit(0)


if __name__ == "__main__":
    main()
