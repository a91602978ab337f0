"""Writes the file of a traced process: one JSON value per line, flushed at once, so that a kill loses nothing written.

In: records, and int64 tensors by name, on any device. Out: `rank-RRRRR-HOST-PID.jsonl` in the trace's folder. A step's
numbers are copied from the device asynchronously, in one copy, and written at the next step: measuring never waits for
the device.
"""

from __future__ import annotations

import base64
import ctypes
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import BEGAN

FORMAT = 1


class Writer:
    """Appends the records of this process to its file, which is created with the first record, when the rank is known.
    Errors do not propagate to the script: a full disk ends the trace with a warning. `replace`: remove the files of an
    earlier run first: each rank its own, and rank 0 those of ranks beyond the world size."""

    def __init__(self, folder: Path, replace: bool = False) -> None:
        self.folder = folder
        self.began = _beginning() if replace else None
        self.failed = False
        self._file: Any = None
        self._pid = 0

    def write(self, kind: str, **values: Any) -> None:
        if self.failed:
            return
        try:
            if self._file is None or self._pid != os.getpid():  # also after a fork
                self._open()
            self._file.write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self.failed = True
            warn(f"cannot write to {self.folder} any more: {error}. The script continues untraced")

    def close(self) -> None:
        """Close the file of this process; a later record opens it again."""
        if self._file is not None and self._pid == os.getpid():
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        rank, world = rank_and_world()
        self._pid = os.getpid()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.began is not None:
            _remove_earlier(self.folder, self.began, rank, world)
        host = socket.gethostname().replace("/", "_")
        self._file = (self.folder / f"rank-{rank:05d}-{host}-{self._pid}.jsonl").open("a", encoding="utf-8")
        head = {
            "kind": "process",
            "format": FORMAT,
            "rank": rank,
            "world": world,
            "host": host,
            "pid": self._pid,
            "argv": sys.argv[:1],  # arguments may hold secrets
            "torch": torch.__version__,
            "time": time.time(),
        }
        self._file.write(json.dumps(head) + "\n")


def _beginning() -> float | None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        return None
    if multiprocessing.parent_process() is None or BEGAN not in os.environ:
        os.environ[BEGAN] = repr(time.time())
    return float(os.environ[BEGAN])


def _remove_earlier(folder: Path, began: float, rank: int, world: int) -> None:
    for path in folder.glob("rank-*-*.jsonl"):
        number = path.name.split("-")[1]
        of = int(number) if number.isdigit() else -1
        if (of == rank or (rank == 0 and of >= world)) and path.stat().st_mtime < began:
            path.unlink()
    about = folder / "trace.json"  # written by a command that did not start this run
    if rank == 0 and about.is_file() and about.stat().st_mtime < began:
        about.unlink()


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world size) from the process group, else from the environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if os.environ.get(rank, "").isdigit() and os.environ.get(world, "").isdigit():
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def warn(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # standard error may be closed or missing
        sys.stderr.write(f"lockstep trace: {text}\n")
        sys.stderr.flush()


def blob(tensor: Tensor) -> str:
    """Encode the bytes of a CPU tensor in base64, without numpy, which may be missing."""
    tensor = tensor.contiguous()
    return base64.b64encode(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())).decode()


class Pending:
    """A pending copy of the numbers of `record`. `on_device`: whether a copy is in progress."""

    def __init__(self, record: dict[str, Any], since: Any, numbers: Mapping[str, Sequence[Tensor]]) -> None:
        self.record, self.since, self.numbers = record, since, numbers
        away = [v.reshape(-1) for each in numbers.values() for v in each if v.device.type != "cpu"]
        self.on_device = bool(away)
        self._wait: Callable[[], None] | None = None
        self._parts: list[Tensor] = []
        if away:
            joined = torch.cat([v.to(away[0].device) for v in away])
            host, self._wait = transfer(joined)
            self._parts = list(host.split([v.numel() for v in away]))

    def host(self) -> dict[str, list[Tensor]]:
        """Return all numbers on the CPU, waiting for the copy, which began one step earlier."""
        if self._wait is not None:
            self._wait()
        parts = iter(self._parts)
        return {
            name: [v if v.device.type == "cpu" else next(parts).view(v.shape) for v in each]
            for name, each in self.numbers.items()
        }


def transfer(joined: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Copy a device tensor to the CPU; return it with a function that waits for the copy. Called once per step."""
    if joined.device.type != "cuda":
        return joined.cpu(), lambda: None
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize


def bits_of(number: Tensor) -> Tensor:
    """Return a scalar as float64 bits, int64 [1], on its device."""
    number = number.detach()
    return (number.real if number.is_complex() else number).double().reshape(1).view(torch.int64)


def number_of(bits: Tensor) -> float:
    """Return the number of CPU bits from `bits_of`."""
    return float(bits.view(torch.float64))
