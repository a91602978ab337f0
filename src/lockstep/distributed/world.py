"""Who am I, and how do I reach the others: rank, device, process group, collectives. Nobody else reads RANK & co.

In: the six variables every launcher sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), or none. Out: one `World` a process.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.run import Run, RunError
from lockstep.distributed.processor import available_cores
from lockstep.distributed.rendezvous import Rendezvous
from lockstep.distributed.stops import StopRequest
from lockstep.track.console import LOG

SIX = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class World:
    """This process among the others of the job. `join` first, `close` last; both are collective."""

    def __init__(self, run: Run, init_method: str = "env://") -> None:
        """Read who this process is; nothing is connected yet.

        `init_method` is where the ranks meet (`tcp://host:port`, `env://`, `file:///path`).
        """
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.host = socket.gethostname()
        self.hosts = [self.host] * self.size  # of every rank, once they have joined
        self.log = run.folder / LOG
        self.device = pick_device(run, self.local_rank)
        self.threads = threads_of(run, self.local_size)
        self.stop = StopRequest(run.stop_after_s)
        self.refusal: str | None = None  # why this rank may not write into OUTPUT, until all ranks are told
        timeout = timedelta(seconds=run.launch.timeout_s)
        self._rendezvous = Rendezvous(init_method, self.rank, self.size, self.size > self.local_size, timeout)
        self._control: dist.ProcessGroup | None = None  # for decisions; None in a job of one process
        self._deterministic = self.device.type == "cuda" and run.strategy.exact
        self._asking: Callable[[], int] | None = None

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the user."""
        return self.rank == 0

    @property
    def whereabouts(self) -> str:
        """Which ranks are on which host, in words."""
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            hosts.setdefault(host, []).append(rank)
        return "; ".join(f"rank {', '.join(map(str, ranks))} on {host}" for host, ranks in hosts.items())

    def join(self) -> World:
        """Set threads, connect to the other ranks, and listen for stop signals. Collective. Errors: `Unreached`."""
        torch.set_num_threads(self.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's condition for reproducible results
            torch.use_deterministic_algorithms(True)
        if self.size > 1:
            self._control = self._rendezvous.join(self.device)
            self.hosts = self.all_gather(self.host)
        self.stop.listen()
        return self

    def close(self) -> None:
        """Leave the process group. The caller has dropped its model: DDP must be gone before the group is."""
        gc.collect()
        if self._asking is not None:
            self._asking()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def variables_for_engines(self) -> Iterator[None]:
        """Engines that read the six variables by themselves see what is so: none of them in a job of one process, or
        they would make a process group of one and wrap the model for nothing."""
        hidden = {name: os.environ.pop(name) for name in SIX if name in os.environ} if self.size == 1 else {}
        try:
            yield
        finally:
            os.environ.update(hidden)

    # -- collectives -------------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over ranks, in place. Collective. Exact for integers and where all but one rank hold
        zero."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._control if tensor.device.type == "cpu" else None)
        return tensor

    def asked_to_stop(self, by_clock: bool = True) -> bool:
        """Whether any rank had been asked to stop when this was last called: the same answer on every rank. Collective.

        The question asked here is answered in the next call, a step later: nobody waits for its travelling. `by_clock`:
        `stop_after` asks too; it must not where nothing can be kept of what was done since, or no start would get on.
        """
        asked = self.stop.asked(by_clock)
        if self._control is None:
            return asked
        answer, self._asking = self._asking, None
        earlier = answer is not None and bool(answer())
        self._asking = self.all_reduce_max(int(asked))
        return earlier

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (small, picklable) on every rank. Collective."""
        if self._control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value (small, picklable), in rank order, on every rank. Collective."""
        if self._control is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def all_reduce_max(self, number: int) -> Callable[[], int]:
        """Begin to ask for the highest of all ranks' numbers; what is returned waits for the answer. Collective, and
        nobody waits before asking for the answer."""
        if self._control is None:
            return lambda: number
        box = torch.tensor([number], dtype=torch.int64)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def answer() -> int:
            work.wait()
            return int(box)

        return answer

    def all_gather_numbers(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin to gather a few numbers of every rank, as many on each; what is returned waits for them, in rank
        order. Collective, and nobody waits before asking for them."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self._control is None:
            return lambda: [mine.tolist()]
        boxes = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(boxes, mine, group=self._control, async_op=True)

        def answer() -> list[list[float]]:
            work.wait()
            return [box.tolist() for box in boxes]

        return answer

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        if self._control is not None:
            dist.barrier(group=self._control)


def pick_device(run: Run, local_rank: int) -> torch.device:
    """The device of a local rank. Errors: `RunError` when `launch.device: cuda` finds none for it, or one that cannot
    compute in the run's precision."""
    wanted = run.launch.device
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count <= local_rank:
        raise RunError(
            f"launch.device: cuda, but local rank {local_rank} finds {count} CUDA device(s); use fewer processes or "
            f"device=cpu"
        )
    if count > local_rank and run.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RunError(
            f"precision: bf16, but {torch.cuda.get_device_name(local_rank)} does not compute in it; use precision=fp16"
        )
    return torch.device("cuda", local_rank) if count > local_rank else torch.device("cpu")


def threads_of(run: Run, local_size: int) -> int:
    """Threads this process computes with: `launch.threads`, else a share of the cores.

    The number of threads changes bits, so an exact run's share depends on `micro_batches` and not on the number of
    processes: it is what each has when as many processes run as can.
    """
    if run.launch.threads != "auto":
        return int(run.launch.threads)
    return max(1, available_cores() // (run.micro_batches if run.strategy.exact else local_size))
