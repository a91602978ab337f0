"""This process within its job: rank, device, process group, collectives. Only this module reads RANK and the like.

In: the torchrun environment variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or
none. Out: one `World` per process.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.errors import coded
from lockstep.config.lazy import lazy
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection
from lockstep.distributed import job_record, torch_internals
from lockstep.distributed.hardware import available_cores, share_gpus
from lockstep.distributed.job_record import MEMBER, TORCHRUN_ENV
from lockstep.distributed.signals import StopRequest, interrupted_at_once
from lockstep.track.console import LOG
from lockstep_trace import streams
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.distributed import membership, portable, rendezvous
else:  # a job of one process meets nobody
    membership, portable, rendezvous = lazy("lockstep.distributed", "membership", "portable", "rendezvous")

# Limits of oneDNN's cache of kernels, which are specific to the sizes of a product: every unpadded micro-batch has its
# own, and the default of 1,024 takes some 350 MiB. A micro-batch of a usual text model uses about 20 kernels.
# torch caches another 1,024 for products and attention, which keeps kernels alive that oneDNN has evicted.
KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "64"}


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a tensor with any strides over a group's ranks, in place, and return it. Collective."""
    if tensor.layout != torch.strided:
        dist.all_reduce(tensor, group=group)
        return tensor
    dense = tensor.contiguous()  # gloo ignores strides: of a column it would add neighbouring memory
    dist.all_reduce(dense, group=group)
    return tensor if dense is tensor else tensor.copy_(dense)


@dataclass(frozen=True)
class DataShard:
    """This rank's position in data parallelism. Ranks with the same `rank` process the same examples together (pipeline
    stages, tensor parallel ranks)."""

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]  # over the ranks that work on different examples, in place; collective


class World:
    """This process among the ranks of the job. Call `join` first and `close` last; both are collective."""

    def __init__(self, run: Run, init_method: str = "env://") -> None:
        """Read this process's rank and device; connects to nothing.

        `init_method`: where the ranks meet (`tcp://host:port`, `env://`, `file:///path`).
        """
        started = os.environ if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else {}  # else: left over from another job
        self.rank = int(started.get("RANK", 0))
        self.size = int(started.get("WORLD_SIZE", 1))
        self.local_rank = int(started.get("LOCAL_RANK", 0))
        self.local_size = int(started.get("LOCAL_WORLD_SIZE", 1))
        self.host = socket.gethostname()
        self.hosts = [self.host] * self.size  # host of every rank, set by `join`
        self.log = run.folder.resolve() / LOG
        self.device = pick_device(run.launch, run.precision, self.local_rank, self.local_size)
        self.threads = threads_of(
            run.launch.threads, run.micro_batches if run.strategy.exact is True else self.local_size
        )
        self.agreed = ""  # hash of the facts that all ranks share: consistency_check.py
        self.stop = StopRequest(run.max_time_s)
        self.refusal: str | None = None  # why this rank may not write into OUTPUT; reported once all ranks have joined
        timeout = timedelta(seconds=run.launch.timeout_s)
        several, shared = self.size > self.local_size, share_gpus(run.launch)
        self._meeting = (init_method, self.rank, self.size, several, timeout, shared)
        self._control: dist.ProcessGroup | None = None  # gloo group for decisions; None in a job of one process
        self.portable = run.strategy.exact == "portable"
        self._deterministic = self.device.type == "cuda" and bool(run.strategy.exact)
        self.gloo_threads = 1  # of each group: `torch_internals.gloo_threads`
        self._asking: Callable[[], int] | None = None
        # None if the launcher keeps no roster
        self.members = membership.Membership.from_environment() if MEMBER in os.environ else None
        self.grows = False  # whether to regroup with more ranks; the same on every rank
        self.joining = self.members is not None and self.members.place.joining  # replacement rank, in no group yet
        if self.joining:
            self.rank, self.size, self.hosts = 0, 1, [self.host]

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes files and prints."""
        return self.rank == 0 and not self.joining

    @property
    def whereabouts(self) -> str:
        """List the ranks of each host, as text."""
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            hosts.setdefault(host, []).append(rank)
        return "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {host}" for host, ranks in hosts.items()
        )

    def join(self) -> World:
        """Set threads, connect to the other ranks, and handle stop signals. Collective. Errors: `Unreached`; `RunError`
        if this process cannot run `strategy.exact: portable`."""
        if self.portable:
            portable.install(self.threads)
        else:
            torch.set_num_threads(self.threads)
            # In evaluation, torch's encoder layers have a path that calls none of their modules: it reads the base
            # weights of layers with adapters, computes any GELU as the exact one, and is off where engines hook them.
            torch.backends.mha.set_fastpath_enabled(False)
        for name, kernels in KEPT_KERNELS.items():
            os.environ.setdefault(name, kernels)  # read at the first product
        torch_internals.gloo_threads(self.gloo_threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS for reproducible results
            torch.use_deterministic_algorithms(True)
            os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers' option of the package flash-attn
            # filling would launch a kernel per new tensor; no code reads uninitialized memory
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if self.members is not None:
            self.members.connect(self._rendezvous.timeout.total_seconds())
        if self.size > 1:
            text = coded("LS7110", "interrupted while this process waited for the other ranks")
            clear = streams.CLEAR if sys.stderr.isatty() else ""
            with interrupted_at_once(f"{clear}lockstep: {text}\n", self._note_interrupt):
                self._meet()
        self.stop.listen()
        return self

    def _note_interrupt(self) -> None:
        """Record the exit status of Ctrl-C, for `lockstep status`."""
        if self.is_main:
            job_record.note(self.log.parent, status=130, ended=time.time())

    @cached_property
    def _rendezvous(self) -> rendezvous.Rendezvous:
        """Return the address at which this job's ranks meet."""
        return rendezvous.Rendezvous(*self._meeting)

    def _meet(self) -> None:
        """Form a group with the other ranks. Collective. Errors: `Unreached`."""
        if self.members is None:
            self._control = self._rendezvous.join(self.device)
            self._rendezvous.compare_secrets(self._control)
        else:
            with self.members.forming():
                store = self.members.store()
                self._control = replace(self._rendezvous, store=store, rank=self.rank, size=self.size).join(self.device)
        self.hosts = self.all_gather(self.host)

    @contextmanager
    def forming(self) -> Iterator[None]:
        """A context for creating further process groups, which are aborted with the main group when a rank fails."""
        with self.members.forming() if self.members is not None else nullcontext():
            yield

    def mesh_axis(self, name: str) -> str:
        """Return a mesh axis name that is unique to this process group. Torch caches by mesh and treats equal-looking
        meshes as one, although this rank's index may differ between them."""
        return name if self.members is None else f"{name}_{self.members.generation.number}"

    def group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
        """Create a process group, within `forming`; `ranks` None: all ranks; `backend` None: the default group's. After
        a regroup the timeout is short until the group is formed, because waiting here for a failed rank cannot be
        aborted. Collective over all ranks."""
        limit = self._rendezvous.timeout
        again = self.members is not None and self.members.generation.number > 0
        within = self._soon if again else limit
        group = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=within)
        if again and (ranks is None or self.rank in ranks):
            torch_internals.set_timeout(group, limit)
        return group

    @property
    def _soon(self) -> timedelta:
        """Timeout for ranks that regroup."""
        return min(self._rendezvous.timeout, timedelta(seconds=membership.SOON_S))

    def detach_group(self) -> None:
        """Leave the process group without waiting for any rank. The caller has dropped its model's wrapper."""
        assert self.members is not None
        self.members.cut()
        self._asking = self._control = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def attach_group(self, generation: membership.Generation) -> None:
        """Form the process group of this generation, all of whose members have arrived. Collective. Errors:
        `Unreached`, and any error of a collective if a rank fails meanwhile."""
        assert self.members is not None
        self.members.take(generation)
        self.rank, self.size = generation.members.index(self.members.me), len(generation.members)
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size))  # for engines that read them
        self.joining, self.grows, self.hosts = False, False, [self.host] * self.size
        if self.size > 1:
            whole = self._rendezvous
            self._rendezvous = replace(whole, timeout=self._soon)
            try:
                self._meet()
            finally:
                self._rendezvous = whole
            for group in (None, self._control):
                torch_internals.set_timeout(group, whole.timeout)

    def close(self) -> None:
        """Leave the process group. The caller has dropped its model: DDP must be destroyed before the group."""
        gc.collect()
        if self.members is not None:
            self.members.stop()
        if self._asking is not None:
            self._asking()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def variables_for_engines(self) -> Iterator[None]:
        """A context that adapts the torchrun environment variables to engines that read them. In a job of one process
        they are unset, or engines would form a group of one and wrap the model for nothing. Where ranks share a GPU,
        LOCAL_RANK is the GPU's index, because engines use it as such. Without OMP_NUM_THREADS, Accelerate would set
        torch's threads to this machine's cores / ranks, and change the bits."""
        variables = {name: os.environ[name] for name in TORCHRUN_ENV if name in os.environ}
        variable, threads = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
        for name in variables if self.size == 1 else ():
            del os.environ[name]
        if self.size > 1 and self.device.type == "cuda":
            os.environ["LOCAL_RANK"] = str(self.device.index)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            yield
        finally:
            os.environ.update(variables)
            del os.environ["OMP_NUM_THREADS"]
            if variable is not None:
                os.environ["OMP_NUM_THREADS"] = variable
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place. Exact for integers, and if all but one rank hold zero. Collective."""
        if self.size > 1:
            all_reduce(tensor, self._control if tensor.device.type == "cpu" else None)
        return tensor

    def asked_to_stop(self, by_clock: bool = True) -> bool:
        """Whether any rank had a stop request at the previous call: the same answer on every rank. Collective.

        Each call sends this rank's state and returns the previous call's answer, so no step waits for the message.
        `by_clock`: whether `max_time` counts as a request; False where progress since the start cannot be saved yet, or
        restarts would never advance.
        """
        stop_requested = self.stop.requested(by_clock)
        offered = 0 if self.members is None else self.members.offered
        if self._control is None:
            self.grows = self.grows or offered > 0
            return stop_requested
        answer, self._asking = self._asking, None
        earlier = 0 if answer is None else answer()
        # a stop that comes with an offer to grow takes effect after the regroup
        self._asking = self.all_reduce_max(int(stop_requested) + 2 * offered)
        self.grows = self.grows or earlier > 1
        return earlier == 1

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value (small, picklable) on every rank. Collective."""
        if self._control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value (small, picklable), in rank order, on every rank. Collective."""
        if self._control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def all_reduce_max(self, number: int) -> Callable[[], int]:
        """Start an all-reduce of the maximum; the returned function waits for the result. Collective; does not wait
        itself."""
        if self._control is None:
            return lambda: number
        box = torch.tensor([number], dtype=torch.int64)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def answer() -> int:
            work.wait()
            return int(box)

        return answer

    def all_gather_numbers(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Start an all-gather of equally many numbers per rank; the returned function waits for them, in rank order.
        Collective; does not wait itself."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self._control is None:
            return lambda: [mine.tolist()]
        boxes = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(boxes, mine, group=self._control, async_op=True)

        def answer() -> list[list[float]]:
            work.wait()
            return [box.tolist() for box in boxes]

        return answer

    def send_round(self, tensor: Tensor, source: int) -> None:
        """Broadcast the tensor of rank `source`, in host memory, to all ranks. Collective."""
        if self._control is not None:
            dist.broadcast(tensor, src=source, group=self._control)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self._control is not None:
            dist.barrier(group=self._control)


def pick_device(launch: LaunchSection, precision: str, local_rank: int, local_size: int = 1) -> torch.device:
    """Return the device of a local rank. Errors: `RunError` if the machine has too few GPUs for its ranks, or they do
    not support the run's precision."""
    device_name, each = launch.device, launch.processes_per_gpu
    count = torch.cuda.device_count() if device_name != "cpu" else 0
    if not count and device_name != "cuda":
        return torch.device("cpu")
    if not count:
        raise RunError(
            "LS7120",
            f"launch.device: cuda, but local rank {local_rank} finds no CUDA device that torch can use; set "
            "launch.device=cpu, or run it on a machine with a GPU (`lockstep doctor` shows what torch sees)",
        )
    if count * each < max(local_size, local_rank + 1):
        raise RunError(
            "LS7070",
            f"launch.device: {device_name}, but local rank {local_rank} of {local_size} finds "
            f"{quantity(count, 'CUDA device')}, each for {quantity(each, 'process')}; use fewer processes, "
            f"launch.device=cpu, or "
            "launch.processes_per_gpu for processes that share one",
        )
    device = torch.device("cuda", local_rank // each)
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RunError(
            "LS7071",
            f"precision: bf16, but {torch.cuda.get_device_name(device)} does not support it; use precision=fp16",
        )
    return device


def threads_of(threads: int | str, processes: int) -> int:
    """Return the number of compute threads: `launch.threads`, or the share of the cores of one of `processes`.

    Results depend on the number of threads, so in an exact run the share is cores / `micro_batches`, whatever the
    number of processes: the share of a process at the maximum number of processes. `exact: portable` does not depend on
    threads.
    """
    return int(threads) if threads != "auto" else max(1, available_cores() // processes)
