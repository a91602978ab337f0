"""Who am I: rank, device, process group, sums over ranks, the stop signal. The only place that reads RANK & co.

In: the six variables every launcher sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), or none. Out: one `World` a process.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.console import LOG
from lockstep.disclosure import one_line
from lockstep.processes import network, secret, stores
from lockstep.processes.stops import Interrupts, heard
from lockstep.run import Run, RunError

SIX = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CONTROL = "control"  # the group on which decisions travel


class Unreached(Exception):
    """The other ranks were not found, or not in time: one message for the user, exit status 1."""


class Stopped(BaseException):
    """A stop signal came within `World.stoppable`."""


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
        self._init_method = init_method
        self._timeout = timedelta(seconds=run.launch.timeout_s)
        self._control: dist.ProcessGroup | None = None
        self._deterministic = self.device.type == "cuda" and run.strategy.exact
        self._stop = self._raises = False
        self._until = time.monotonic() + (run.stop_after_s or math.inf)
        self.place, self.progress = "at the start", 0
        self.refusal: str | None = None  # why this rank may not write into OUTPUT, until all ranks are told
        self._asking: tuple[dist.Work, Tensor] | None = None

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the user."""
        return self.rank == 0

    @property
    def stopping(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._stop

    def end_by_signal(self) -> NoReturn:
        """End as SIGTERM ends a process that does not listen to it: whoever asked takes it for what it is."""
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)  # where it is blocked

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
            # torch's flight recorder remembers the newest collectives: what a rank waits in when it does not move
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            arguments: dict[str, Any] = {"device_id": self.device} if self.device.type == "cuda" else {}
            try:
                self._choose_interface()
                stores.seal_pickles(secret.given())
                dist.init_process_group(
                    backend,
                    **self._place(),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=self._timeout,
                    **arguments,
                )
                # Decisions travel on a group of their own: they never wait behind gradients or for the device.
                self._control = dist.new_group(backend="gloo", timeout=self._timeout, group_desc=CONTROL)
                self.hosts = self.everyone(self.host)
            except (RuntimeError, network.NetworkError) as caught:
                raise Unreached(self._unreached(caught)) from caught
        for number in heard():
            signal.signal(number, self._on_signal)
        end_at_second_interrupt()
        return self

    def _meets_at(self) -> tuple[str, str]:
        """Host and port where the ranks meet; empty where they meet in a file."""
        if self._init_method == "env://":
            return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        host, _, port = self._init_method.partition("tcp://")[2].rpartition(":")
        return host, port

    def _place(self) -> dict[str, Any]:
        """Where `init_process_group` shall meet the others: a store, opened by rank 0 on the address it is known by."""
        host, port = self._meets_at()
        if not host or not port:
            return {"init_method": self._init_method}
        several, limit_s = self.size > self.local_size, self._timeout.total_seconds()
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
        if self.rank or (held and self._init_method == "env://"):
            store = stores.connected(host, int(port), limit_s, limit_s)
        else:
            store = stores.opened(host, int(port), several, limit_s)
        return {"store": dist.PrefixStore("default_pg", store)}

    def _choose_interface(self) -> None:
        """Tell gloo and NCCL which interface the others reach this process at: the one towards where the ranks meet."""
        host, _ = self._meets_at()
        if not host or "GLOO_SOCKET_IFNAME" in os.environ:
            return
        limit_s = min(60.0, self._timeout.total_seconds())  # a container's name may take a while to be known
        found = network.patiently(lambda: network.interface_to(host, several=self.size > self.local_size), limit_s)
        if found is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = found
            if found != "lo":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", found)

    def _unreached(self, caught: Exception) -> str:
        host, port = self._meets_at()
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        address = network.interfaces().get(name or "")
        through = f"{name} ({address or 'which has no address here'})" if name else "an interface it chose itself"
        return (
            f"rank {self.rank} of {self.size} on {self.host} did not meet the other ranks"
            f"{f' at {host}:{port}' if host else ''} within {self._timeout.total_seconds():g} s (launch.timeout_s), "
            f"through {through}: {one_line(caught, 300)}\nIs every process running, is the address that "
            f"of rank 0, and can the others reach this interface? GLOO_SOCKET_IFNAME chooses another one"
        )

    def close(self) -> None:
        """Leave the process group. The caller has dropped its model: DDP must be gone before the group is."""
        gc.collect()
        self._answer()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if self._raises:
            self._raises = False  # once: what tidies up is left alone
            raise Stopped

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """In here a stop signal does not wait for the end of a step. Not collective. Errors: `Stopped`, also where the
        signal came before."""
        self._raises = not self._stop
        try:
            if self._stop:
                raise Stopped
            yield
        finally:
            self._raises = False

    def at(self, place: str) -> None:
        """Say where in the program this rank is, for whoever asks when it does not move any more."""
        self.place = place
        self.progress += 1

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
        self._stop = self._stop or (by_clock and time.monotonic() > self._until)
        if self._control is None:
            return self._stop
        answer = self._answer()
        flag = torch.tensor([int(self._stop)], dtype=torch.int32)
        self._asking = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control, async_op=True), flag)
        return answer

    def _answer(self) -> bool:
        if self._asking is None:
            return False
        work, flag = self._asking
        work.wait()
        self._asking = None
        return bool(flag.item())

    def wait_to_be_stopped(self, seconds: float) -> bool:
        """Until a stop signal comes, or for so long. Returns whether one came. Not collective."""
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(0.02)
        return self._stop

    def from_main(self, value: Any) -> Any:
        """Rank 0's value (small, picklable) on every rank. Collective."""
        if self._control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def everyone(self, value: Any) -> list[Any]:
        """Every rank's value (small, picklable), in rank order, on every rank. Collective."""
        if self._control is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def highest(self, number: int) -> Callable[[], int]:
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

    def each(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
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


def keep_freed_memory() -> None:
    """What this process frees from now on it keeps for what it allocates next. A step makes the same gradients, buckets
    and activations as the step before; what went back to the kernel comes back zeroed and page by page. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: up to a GiB comes from the heap, not from a mapping of its own
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: of which at most 2 GiB stay free


def end_at_second_interrupt() -> None:
    """The first Ctrl-C asks for a stop at the end of the step; the second one ends this process at once, also while it
    waits in a collective, where no signal handler of Python runs."""
    if threading.current_thread() is not threading.main_thread():
        return
    receive, send = socket.socketpair()
    send.setblocking(False)
    signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)

    def count(receive: socket.socket, send: socket.socket) -> None:  # both stay open as long as this thread
        interrupts = Interrupts()
        while data := receive.recv(64):
            if any(interrupts.again(number) for number in data):
                os._exit(130)

    threading.Thread(target=count, args=(receive, send), name="lockstep-signals", daemon=True).start()


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
            f"precision: bf16, but {torch.cuda.get_device_name(local_rank)} does not compute in it; use precision=fp32"
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


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seed_everything(seed: int, *place: int) -> None:
    """Seed Python's, numpy's and torch's own generators (on every device) from `(seed, *place)`.

    Piece k of step t goes through the model with `place = (t, k)`, and is collated, where a task's `collate` may draw,
    with `(t, k, 1)`; batch b of an evaluation has `(-1, b)`, and what is written for people `(-2,)`.
    """
    number = mix(seed, *place)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_libraries(seed: int) -> None:
    """Seed Python and numpy too, for model code that draws from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mix(*numbers: int) -> int:
    """One well-mixed 63-bit number from several (splitmix64's finaliser, Steele et al. 2014, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & 0xFFFFFFFFFFFFFFFF) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
