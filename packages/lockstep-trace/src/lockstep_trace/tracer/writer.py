"""Writes the file of a traced process: one JSON value per line, flushed at once, so that a kill loses nothing written.

In: records. Out: `rank-RRRRR-HOST-PID.jsonl` in the trace's folder.
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
